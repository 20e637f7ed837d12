"""Which groups of episodes are selected for a batch: as a whole, with at least two attempts, whatever their size."""

from sqlalchemy import update

from app.models import Sample, SampleState, Turn
from app.training.fill_batch import NORMAL, WAITS_FOR_NEW, ReadyGroup, fill_batch
from tests.support import episodes
from tests.support.attempts import SOURCES, attempt, compare, read_samples
from tests.support.deployment import Harness
from workers.curate import curate
from workers.training.assemble import assemble


async def test_caps_of_raters_leave_out_whole_groups(harness: Harness) -> None:
    """One place for each rater: the program that reports outcomes has rated a part of every group."""
    size = {"trainer.batch_size": 24, "trainer.max_batch_size": 24, "trainer.min_batch_size": 2}
    compare(harness, {**size, "raters.max_rater_share": 0.05})
    for number in range(3):
        group = {"id": f"g{number}", "size": 2}
        first = await attempt(harness, 2, group=group)
        turns = [turn for turn in await harness.all(Turn) if turn.episode_id == first["id"]]
        await harness.vote(turns[0].id, "up", source={"id": f"user-{number}"})
        await episodes.end(harness, first["id"], outcome=1.0)
        await attempt(harness, 2, -1.0, group=group)
    await read_samples(harness)
    assert await assemble(harness.db, harness.settings) == 1
    states: dict[str | None, set[str]] = {}
    for sample in await harness.all(Sample):
        states.setdefault(sample.group_id, set()).add(sample.state)
    assert sorted(map(sorted, states.values())) == [[SampleState.BATCHED], [SampleState.OPEN], [SampleState.OPEN]]


async def test_lone_attempt_of_many_turns_is_nothing_to_compare(harness: Harness) -> None:
    """Its returns differ by the discount alone."""
    compare(harness)
    own = {"sources": SOURCES, "episode_credit": "return"}
    assert (await harness.api.put("/v1/policies/shop/rewards", json=own)).status_code == 200
    await attempt(harness, 3, 1.0)
    await curate(harness.db, harness.settings)
    async with harness.db.write() as session:
        await session.execute(update(Sample).values(ready_at=1.0))
    assert await assemble(harness.db, harness.settings) == 0
    await attempt(harness, 2, -1.0)
    await curate(harness.db, harness.settings)
    assert await assemble(harness.db, harness.settings) == 1


async def test_attempts_with_equal_rewards_have_no_contrast(harness: Harness) -> None:
    compare(harness)
    own = {"sources": SOURCES, "episode_credit": "return"}
    assert (await harness.api.put("/v1/policies/shop/rewards", json=own)).status_code == 200
    for _ in range(2):
        await attempt(harness, 3, 1.0)
    await curate(harness.db, harness.settings)
    assert await assemble(harness.db, harness.settings) == 0


def test_large_group_that_waits_for_new_samples_joins_them() -> None:
    """60 turns returned from a batch, and batches of at most 96: they are never at most half of one."""
    returned = ReadyGroup(WAITS_FOR_NEW, 0.0, "episodes/g", {f"t{i}": float(i % 2) for i in range(60)}, False)
    new = [
        ReadyGroup(NORMAL, float(j), f"episodes/{j}", {f"s{j}-{i}": float(i % 2) for i in range(20)}, False)
        for j in range(3)
    ]
    assert len(fill_batch([*new, returned], 96, 10)) == 120
    assert len(fill_batch([*new[:1], returned], 96, 10)) == 20, "too few new samples"
    assert fill_batch([returned], 96, 10) == {}
