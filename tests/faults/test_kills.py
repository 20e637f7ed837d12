"""Every kind of process killed under load at random moments: a short part of `make faults`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import missing
from tests.faults.suite import services
from tests.faults.suite.deployment import KINDS, Deployment, small
from tests.faults.suite.kills import storm
from tests.faults.suite.load import Load
from tests.faults.suite.nursery import Nursery
from tests.faults.suite.watch import Watch

KILLS = 2
LEARNED_SECONDS = 240.0
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(params=["embedded", pytest.param("services", marks=pytest.mark.postgres)])
def urls(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """Nothing for the embedded default; a PostgreSQL and a Redis of the test's own."""
    if request.param == "embedded":
        yield {}
        return
    if not services.available():
        missing("no PostgreSQL or Redis to start")
    with services.Services() as running:
        yield running.urls()


async def learned(watch: Watch, load: Load) -> None:
    """The load goes on until a version has come of it, however soon the killing was over."""
    await watch.learned(LEARNED_SECONDS)


async def test_kills_under_load_lose_nothing_and_repeat_nothing(
    tmp_path: Path, nursery: Nursery, urls: dict[str, str]
) -> None:
    settings = small(tmp_path / "home", judged=True, **urls)
    async with Deployment(settings, {"api": {"FAULTS_RINGS": "none"}}, nursery) as deployment:
        result = await storm(deployment, 7, dict.fromkeys(KINDS, KILLS), meanwhile=learned)
    assert result.found is not None
    print(f"\n{dict(result.kills)} kills, recovered {result.recovered}, {result.found}")
    assert result.wrong == []
    assert result.kills == dict.fromkeys(KINDS, KILLS)
    assert result.found.acked > 0
    assert result.found.versions > 0, "nothing was learned, so nothing was shown"
