"""When the samples of a group of episodes are ready: together, once the sources of all turns have answered."""

import time
from typing import Any

import pytest
from sqlalchemy import update

from app.models import Episode, Turn
from tests.support import episodes
from tests.support.attempts import SOURCES, attempt, compare, read_samples
from tests.support.deployment import Harness
from workers.curate import curate

JUDGE_WINDOW = 60.0  # seconds after a turn
JUDGE = {"type": "judge", "name": "j", "url": "http://127.0.0.1:9/v1", "model": "m", "window_seconds": JUDGE_WINDOW}


async def let_first_turns_be_old(harness: Harness) -> None:
    """Of each episode, the last turn alone is still in the window of the judge."""
    async with harness.db.write() as session:
        old = {"created_at": time.time() - 500, "finished_at": time.time() - 490}
        await session.execute(update(Turn).where(Turn.episode_step == 1).values(old))


async def end_of_last_turn(harness: Harness) -> float:
    return max(turn.finished_at or 0.0 for turn in await harness.all(Turn))


@pytest.mark.parametrize("credit", ["outcome", "return"])
async def test_samples_of_a_group_wait_for_the_sources_of_all_its_turns(harness: Harness, credit: str) -> None:
    compare(harness)
    own = {"sources": [*SOURCES, JUDGE], "episode_credit": credit}
    assert (await harness.api.put("/v1/policies/shop/rewards", json=own)).status_code == 200
    attempts = [await attempt(harness, 2), await attempt(harness, 2)]
    await let_first_turns_be_old(harness)
    for one, outcome in zip(attempts, (1.0, -1.0), strict=True):
        await episodes.end(harness, one["id"], outcome=outcome)
    found = await read_samples(harness)
    ready_at = {sample.ready_at for samples in found.values() for sample in samples}
    assert len(ready_at) == 1 and ready_at.pop() >= await end_of_last_turn(harness) + JUDGE_WINDOW / 2


async def test_samples_of_an_episode_wait_for_the_sources_of_all_its_turns(harness: Harness) -> None:
    """Without a group, where turns are rewarded by their returns."""
    own = {"sources": [*SOURCES, JUDGE], "episode_credit": "return"}
    assert (await harness.api.put("/v1/policies/shop/rewards", json=own)).status_code == 200
    episode = await attempt(harness, 2, group=None)
    await let_first_turns_be_old(harness)
    await episodes.end(harness, episode["id"], outcome=1.0)
    [samples] = (await read_samples(harness)).values()
    ready_at = {sample.ready_at for sample in samples}
    assert len(ready_at) == 1 and ready_at.pop() >= await end_of_last_turn(harness) + JUDGE_WINDOW / 2


async def test_deleted_attempt_does_not_hold_up_the_others(harness: Harness) -> None:
    """It was open, so its group has waited for its end."""
    compare(harness)
    for outcome in (1.0, -1.0):
        await attempt(harness, 1, outcome)
    extra: dict[str, Any] = await attempt(harness, 1)
    latest = max(row.deadline_at for row in await harness.all(Episode))
    assert all(sample.ready_at > latest for [sample] in (await read_samples(harness)).values())
    assert (await harness.api.delete(f"/v1/episodes/{extra['id']}")).is_success
    await curate(harness.db, harness.settings)
    found = await read_samples(harness)
    assert len(found) == 2 and all(sample.ready_at < latest for [sample] in found.values())
