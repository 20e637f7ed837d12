"""Episodes whose turns are rewarded by their returns are in a batch as a whole, and caps count them."""

from collections import Counter
from typing import Any

import pytest
from sqlalchemy import update

from app.models import Batch, BatchState, Sample, SampleState, Turn
from app.training.fill_batch import NORMAL, WAITS_FOR_NEW, ReadyGroup, fill_batch
from tests.support.attempts import SOURCES, attempt, read_samples
from tests.support.deployment import Harness
from tests.support.waiting_samples import add_samples
from workers.training import batch_claims, batches
from workers.training.assemble import assemble

SIZE = {"trainer.min_batch_size": 2, "trainer.max_wait_seconds": 0.0, "raters.min_raters": 1}


async def credit(harness: Harness, size: int, *, by: str = "return", discount: float = 0.5, **settings: float) -> None:
    """Credit turns so, in batches of `size` samples without a cap of raters."""
    own = {"sources": SOURCES, "episode_credit": by, "episode_discount": discount}
    assert (await harness.api.put("/v1/policies/shop/rewards", json=own)).status_code == 200
    values = {"trainer.batch_size": size, "trainer.max_batch_size": size, "raters.max_rater_share": 1.0, **SIZE}
    named = {name.replace("__", "."): value for name, value in settings.items()}
    harness.settings = harness.settings.replace(values | named)


async def play(harness: Harness, *attempts: tuple[int, float]) -> list[str]:
    """Play episodes outside of groups, of so many turns with such an outcome. Return their ids."""
    ids = [(await attempt(harness, length, outcome, group=None))["id"] for length, outcome in attempts]
    await read_samples(harness)
    return ids


async def num_batched(harness: Harness) -> dict[str, int]:
    """Return the number of samples that are in a batch, by episode."""
    samples = {sample.turn_id: sample for sample in await harness.all(Sample)}
    batched = [turn for turn in await harness.all(Turn) if samples[turn.id].state == SampleState.BATCHED]
    return dict(Counter(turn.episode_id or "" for turn in batched))


async def test_cap_of_conversations_cuts_no_episode(harness: Harness) -> None:
    """Of each conversation a batch of 20 has at most two samples by default, and each episode is one of five."""
    await credit(harness, 20, raters__max_conversation_share=0.1)
    ids = await play(harness, (5, 1.0), (5, -1.0))
    assert await assemble(harness.db, harness.settings) == 1
    assert await num_batched(harness) == dict.fromkeys(ids, 5)
    claimed = await batch_claims.claim(harness.db, "a trainer", harness.settings)
    assert claimed is not None
    found = {sample.turn_id for sample in claimed.batch.samples}
    assert sum(sample.parent in found for sample in claimed.batch.samples) == 8, "all but the roots"


async def test_caps_are_shares_of_the_episodes_of_a_batch(harness: Harness) -> None:
    """Batches of 24 samples have six episodes of four turns, of which one conversation may have a third."""
    await credit(harness, 24, raters__max_conversation_share=0.34)
    ids = await play(harness, *[(4, (-1.0) ** number) for number in range(8)])
    async with harness.db.write() as session:
        in_first = [turn.id for turn in await harness.all(Turn) if turn.episode_id in ids[:4]]
        for model in (Turn, Sample):
            id = Turn.id if model is Turn else Sample.turn_id
            await session.execute(update(model).where(id.in_(in_first)).values(conversation_id="c"))
    assert await assemble(harness.db, harness.settings) == 1
    assert await num_batched(harness) == dict.fromkeys([*ids[:2], *ids[4:]], 4)


async def test_rater_has_a_share_of_the_episodes(harness: Harness) -> None:
    """Six episodes of one program, and twelve replies of as many people: a batch of twelve has six episodes."""
    await credit(harness, 12, raters__max_rater_share=0.34, raters__trust=False)
    ids = await play(harness, *[(4, (-1.0) ** number) for number in range(6)])
    people = [(await harness.turn()).id for _ in range(12)]
    for number, turn_id in enumerate(people):
        await harness.vote(turn_id, "up" if number % 2 else "down", source={"id": f"user-{number}"})
    await read_samples(harness)
    assert await assemble(harness.db, harness.settings) == 1
    found = await num_batched(harness)
    # 18 units of 36 samples: a batch of 12 has 6 units, of which the program has 2.
    assert {id: found.get(id) for id in ids} == dict.fromkeys(ids[:2], 4) | dict.fromkeys(ids[2:])


@pytest.mark.parametrize("discount", [0.5, 1.0])
async def test_episode_that_is_larger_than_a_batch_is_learned_from(harness: Harness, discount: float) -> None:
    """As a whole, with others, so that there is contrast also where all of its returns are equal."""
    await credit(harness, 4, discount=discount)
    ids = await play(harness, (9, 1.0), (2, -1.0), (2, -1.0))
    assert await assemble(harness.db, harness.settings) == 1
    assert await num_batched(harness) == {ids[0]: 9, ids[1]: 2}
    async with harness.db.write() as session:
        await session.execute(update(Batch).values(state=BatchState.TRAINED))
    await play(harness, (1, 1.0))
    assert await assemble(harness.db, harness.settings) == 1
    assert (await num_batched(harness))[ids[2]] == 2


async def test_outcomes_are_cut_by_caps_as_replies_are(harness: Harness) -> None:
    await credit(harness, 20, by="outcome", raters__max_conversation_share=0.1)
    ids = await play(harness, (5, 1.0), (5, -1.0))
    assert await assemble(harness.db, harness.settings) == 1
    assert await num_batched(harness) == dict.fromkeys(ids, 1)


async def test_samples_are_of_no_episode_once_outcomes_are_credited(harness: Harness) -> None:
    await credit(harness, 20)
    await play(harness, (2, 1.0))
    assert all((sample.group_id or "").startswith("episode/") for sample in await harness.all(Sample))
    await credit(harness, 20, by="outcome")
    turns = await harness.all(Turn)
    await harness.vote(turns[0].id, "up")
    await read_samples(harness)
    samples = {sample.turn_id: sample.group_id for sample in await harness.all(Sample)}
    assert samples[turns[0].id] == turns[0].completion_id


async def test_open_samples_of_an_episode_are_learned_from_once_outcomes_are_credited(harness: Harness) -> None:
    """They keep its key, and a batch no longer has all of an episode, which may have more samples than are read."""
    await credit(harness, 8, by="outcome", raters__max_cluster_share=1.0, raters__max_conversation_share=1.0)
    await add_samples(harness, 100, lambda number: (-1.0) ** number)
    async with harness.db.write() as session:
        await session.execute(update(Sample).values(group_id="episode/ep-old"))
    assert await assemble(harness.db, harness.settings) == 1
    assert [sample.state for sample in await harness.all(Sample)].count(SampleState.BATCHED) > 0


async def test_samples_that_failed_are_isolated_from_their_episodes(harness: Harness) -> None:
    """Else an episode with one sample that no update can use would fail as a whole until all of it is dropped."""
    await credit(harness, 8)
    await play(harness, (8, 1.0), (8, -1.0))
    assert await assemble(harness.db, harness.settings) == 1
    claimed = await batch_claims.claim(harness.db, "a trainer", harness.settings)
    assert claimed is not None and len(claimed.batch.samples) == 16
    await batches.quarantine(harness.db, claimed, "its loss is not finite")
    await read_samples(harness)
    assert await assemble(harness.db, harness.settings) == 1
    assert sum((await num_batched(harness)).values()) == 4


def group(key: str, num_samples: int, priority: int = NORMAL) -> ReadyGroup:
    rewards = {f"{key}-{i}": float(i % 2) for i in range(num_samples)}
    return ReadyGroup(priority, 0.0, key, rewards, False)


def test_large_episode_takes_half_of_the_places() -> None:
    large: list[Any] = [group(f"episode/{number}", 200) for number in range(3)]
    assert len(fill_batch(large, 64, 10)) == 400
    assert len(fill_batch([*large[:1], *[group(f"turn-{i}", 1) for i in range(100)]], 64, 10)) == 232
    assert len(fill_batch(large, 64, 10, splits_episodes=True)) == 64


def test_large_episode_that_waits_for_new_samples_joins_them() -> None:
    waits = group("episode/0", 200, WAITS_FOR_NEW)
    new = [group(f"turn-{i}", 1) for i in range(64)]
    assert len(fill_batch([*new[:32], waits], 64, 10)) == 232
    assert len(fill_batch([*new[:31], waits], 64, 10)) == 31
