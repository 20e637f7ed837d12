"""Every kind of process is killed under load at random moments: a short part of `make faults`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import skip_or_fail
from tests.faults.suite import services
from tests.faults.suite.deployment import KINDS, Deployment, make_settings
from tests.faults.suite.fork_server_client import ForkServerClient
from tests.faults.suite.kills import run_faults
from tests.faults.suite.load import Load
from tests.faults.suite.progress import ProgressMonitor

KILLS = 2
VERSION_SECONDS = 240.0
pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


@pytest.fixture(params=["embedded", pytest.param("services", marks=pytest.mark.postgres)])
def urls(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """Yield no settings for the embedded default, or the settings of a private PostgreSQL and Redis."""
    if request.param == "embedded":
        yield {}
        return
    if not services.are_available():
        skip_or_fail("no PostgreSQL or Redis to start")
    with services.Services() as running:
        yield running.urls()


async def wait_for_version(monitor: ProgressMonitor, load: Load) -> None:
    """Keep the load running until a version is released, even if the kills end sooner."""
    await monitor.wait_for_version(VERSION_SECONDS)


async def test_kills_under_load_lose_nothing_and_repeat_nothing(
    tmp_path: Path, fork_server: ForkServerClient, urls: dict[str, str]
) -> None:
    settings = make_settings(tmp_path / "home", judged=True, **urls)
    async with Deployment(settings, {"api": {"FAULTS_MESSAGES": "none"}}, fork_server) as deployment:
        result = await run_faults(deployment, 7, dict.fromkeys(KINDS, KILLS), meanwhile=wait_for_version)
    assert result.report is not None
    print(f"\n{dict(result.kills)} kills, recovered {result.recovered}, {result.report}")
    assert result.errors == []
    assert result.kills == dict.fromkeys(KINDS, KILLS)
    assert result.report.acknowledged > 0
    assert result.report.versions > 0, "no version was trained, so the test proves nothing"
