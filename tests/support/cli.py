"""The command line against the API of a harness."""

from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from app.core.settings import get_settings
from tests.support.deployment import Harness

run = CliRunner().invoke


@pytest.fixture
def cli_harness(harness: Harness, live_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    """Set the environment variables that connect commands to the API of `harness`."""
    host, _, port = live_url.removeprefix("http://").partition(":")
    for name, value in {"SERVER__HOST": host, "SERVER__PORT": port, "API_KEY": harness.key, "POLICY": "shop"}.items():
        monkeypatch.setenv(f"ATTUNE_{name}", value)
    monkeypatch.setenv("ATTUNE_DATABASE__URL", harness.settings.database_url)
    monkeypatch.setenv("ATTUNE_HOME", str(harness.settings.home))
    get_settings.cache_clear()
    yield harness
    get_settings.cache_clear()
