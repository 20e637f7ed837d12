"""The limits of a project on the command line: a typing mistake sets nothing."""

import asyncio

import pytest

from app.cli.main import app
from app.models import Project
from tests.support.cli import run
from tests.support.deployment import Harness


async def run_limits(harness: Harness, *limits: str) -> tuple[int, str]:
    """Return the command's exit code and its output. It has an event loop of its own, so it runs in a thread."""
    [project] = await harness.all(Project)
    options = [word for limit in limits for word in ("--limit", limit)]
    result = await asyncio.to_thread(lambda: run(app, ["projects", "limits", project.name, *options]))
    return result.exit_code, f"{result.output} {result.exception or ''}"


async def test_limits_are_digits_or_none(cli_harness: Harness) -> None:
    _, output = await run_limits(cli_harness, "pins=5", "dataset_bytes=100")
    assert "pins: 5" in output and "dataset_bytes: 100" in output
    exit_code, output = await run_limits(cli_harness, "pins=none")
    assert exit_code == 0 and "pins: 5\n" not in output


@pytest.mark.parametrize("limit", ["pins=1e4", "pins=10_000", "pins=-1", "pins", "pins=", "pins=None", "pin=3"])
async def test_typing_mistake_is_refused_and_keeps_the_limit(cli_harness: Harness, limit: str) -> None:
    assert (await run_limits(cli_harness, "pins=5"))[0] == 0
    exit_code, output = await run_limits(cli_harness, limit)
    assert exit_code != 0 and limit.partition("=")[0] in output
    assert "pins: 5\n" in (await run_limits(cli_harness))[1]
