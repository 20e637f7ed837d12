"""One kill of the real engine with two replicas under load; `make faults` runs a hundred."""

import pytest

from tests.faults.suite.engines import storm
from tests.support.engine_fixture import require_engine_environment

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.mark.slow
async def test_engine_killed_during_chats_and_releases() -> None:
    require_engine_environment()
    result = await storm(3, 1, 300.0, print, versions=8)
    assert result.wrong == []
    assert result.kills.total() == 1 and len(result.back) == 1
    assert result.replies["whole"] == result.computed_again > 0 and result.another_version == 0
    assert result.replies["cut without a word"] == 0 and result.moves["published"] > 0
