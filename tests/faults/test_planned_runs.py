"""A planned run is played while every process is killed: a short part of `make faults`."""

from pathlib import Path

import pytest

from tests.conftest import skip_or_fail
from tests.faults.suite import services
from tests.faults.suite.fork_server_client import ForkServerClient
from tests.faults.suite.planned_runs import Planned, play_under_kills

PLANNED = Planned(num_tasks=40, num_kills=2)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("where", ["embedded", pytest.param("services", marks=pytest.mark.postgres)])
async def test_every_attempt_is_learned_from_once_whatever_is_killed(
    tmp_path: Path, fork_server: ForkServerClient, where: str
) -> None:
    if where == "services" and not services.are_available():
        skip_or_fail("no PostgreSQL or Redis to start")
    row = await play_under_kills(tmp_path, where, 7, PLANNED, fork_server)
    print(f"\n{row['case']}: {row['counts']}")
    assert row["errors"] == []
    assert row["counts"]["attempts"] + row["counts"]["attempts lost"] == PLANNED.num_attempts
    assert row["counts"]["turns learned from"] > 0 == row["counts"]["turns of another version"]
