"""Outages of the database and the broker under load: a short part of `make faults`."""

from pathlib import Path

import pytest

from tests.conftest import missing
from tests.faults.suite import services
from tests.faults.suite.nursery import Nursery
from tests.faults.suite.outages import outage

pytestmark = [pytest.mark.timeout(600), pytest.mark.postgres]


@pytest.mark.parametrize("case", ["database refuses", "database stalls", "broker killed -9, 10 minutes"])
@pytest.mark.slow
async def test_outage_loses_nothing_acknowledged_and_work_continues(
    tmp_path: Path, nursery: Nursery, case: str
) -> None:
    if not services.available():
        missing("no PostgreSQL or Redis to start")
    told = await outage(tmp_path, case, seed=7, times=1, nursery=nursery, haste=200)  # ten minutes are three seconds
    print(f"\n{told['case']}: {told['counts']}")
    assert told["wrong"] == []
    assert told["counts"]["versions"] > 0
    if case.startswith("database"):
        refused = told["counts"]["refused meanwhile"]
        assert set(refused) <= {"completions 503", "feedback 503"}, "nothing else than a 503, and that quickly"
        assert refused
