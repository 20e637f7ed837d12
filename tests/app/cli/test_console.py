"""`attune console open`: a link that signs in once."""

import pytest

from app.cli.console import describe_console
from app.cli.main import app
from app.core.settings import get_settings
from tests.support.cli import run
from tests.support.console import open_console
from tests.support.deployment import Harness


async def test_open_prints_a_link_that_signs_in(cli_harness: Harness) -> None:
    result = run(app, ["console", "open"])
    assert result.exit_code == 0, result.output
    url, _, token = result.stdout.strip().partition("#link=")
    assert url.startswith("http://127.0.0.1:") and url.endswith("/console/sign-in")
    answer = await open_console(cli_harness).send("sign-in", {"link": token})
    assert answer.status_code == 303


async def test_console_is_described_and_a_wrong_key_gets_a_sentence(
    cli_harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "/console/sign-in#link=" in describe_console(get_settings())
    monkeypatch.setenv("ATTUNE_API_KEY", "sk-attune-wrong")
    get_settings.cache_clear()
    result = run(app, ["console", "open"])
    assert result.exit_code == 1 and "unknown or revoked" in result.output
