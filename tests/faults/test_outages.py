"""Outages of the database and the broker under load: a short part of `make faults`."""

from pathlib import Path

import pytest

from tests.conftest import skip_or_fail
from tests.faults.suite import services
from tests.faults.suite.fork_server_client import ForkServerClient
from tests.faults.suite.outages import run_outage

pytestmark = [pytest.mark.timeout(600), pytest.mark.postgres]


@pytest.mark.parametrize("case", ["database refuses", "database stalls", "broker killed -9, 10 minutes"])
@pytest.mark.slow
async def test_outage_loses_nothing_acknowledged_and_work_continues(
    tmp_path: Path, fork_server: ForkServerClient, case: str
) -> None:
    if not services.are_available():
        skip_or_fail("no PostgreSQL or Redis to start")
    row = await run_outage(
        tmp_path, case, seed=7, times=1, fork_server=fork_server, speedup=200.0
    )  # ten minutes are compressed to three seconds
    print(f"\n{row['case']}: {row['counts']}")
    assert row["errors"] == []
    assert row["counts"]["versions"] > 0
    assert row["counts"]["streams done"] > 0 == row["counts"]["cut"] == row["counts"]["turns left open"]
    if case.startswith("database"):
        refused = row["counts"]["refused meanwhile"]
        errors = {"completions 503", "feedback 503", "completions stream error"}
        assert set(refused) <= errors, "a request succeeds, gets a 503, or its stream ends with an error event"
        assert refused
