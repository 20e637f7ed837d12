"""A deployment that takes Langfuse's scores."""

import pytest

from app.core.settings import Settings


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.replace({"langfuse.intake": True, "langfuse.ranges": {"quality": (1, 5)}})
