"""The service that the examples speak with, as their variables name it. Its engine is scripted."""

import pytest

from tests.support.deployment import Harness


@pytest.fixture
def database_url(sqlite_url: str) -> str:
    """Return SQLite's alone: an agent cannot see which database the service has."""
    return sqlite_url


@pytest.fixture
def service(live_url: str, harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTUNE_URL", live_url)
    monkeypatch.setenv("ATTUNE_API_KEY", harness.key)
