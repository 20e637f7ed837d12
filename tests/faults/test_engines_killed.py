"""One kill of the real engine with two replicas under load; `make faults` runs a hundred."""

import pytest

from tests.faults.suite.engine_kills import run_engine_kills
from tests.support.engine_fixture import require_engine_environment

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.mark.slow
async def test_engine_killed_during_chats_and_releases() -> None:
    require_engine_environment()
    result = await run_engine_kills(3, 1, 300.0, print, num_versions=8)
    assert result.errors == []
    assert result.kills.total() == 1 and len(result.recovery) == 1
    assert result.replies["complete"] == result.recomputed > 0 and result.mislabelled == 0
    assert result.replies["cut without an error"] == 0 and result.operations["published"] > 0
