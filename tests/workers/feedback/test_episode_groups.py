"""Groups of whole episodes for algorithms that compare: one batch, ready together, statistics over episodes."""

from typing import Any

import pytest
from sqlalchemy import update

from app.models import Episode, Sample, SampleState, Turn
from app.training.episode_groups import key_of_group
from tests.support import episodes
from tests.support.attempts import SOURCES, attempt, compare, read_samples
from tests.support.deployment import Harness
from workers.curate import curate
from workers.training import batch_claims
from workers.training.assemble import assemble


@pytest.fixture
async def compared(harness: Harness) -> Harness:
    return compare(harness)


async def test_group_is_ready_when_all_attempts_have_ended(compared: Harness) -> None:
    first = await attempt(compared, 2, 1.0)
    samples = (await read_samples(compared))[first["id"]]
    [row] = await compared.all(Episode)
    assert {sample.ready_at for sample in samples} == {row.deadline_at + 600}, "the second attempt has not begun"
    outcomes = await compared.api.get("/v1/feedback", params={"episode_id": first["id"]})
    outcome = outcomes.json()["data"][0]["outcome"]
    assert (outcome["waiting_for"], outcome["until"]) == ("episode_group", row.deadline_at + 600)
    second = await attempt(compared, 1)
    await curate(compared.db, compared.settings)
    assert await assemble(compared.db, compared.settings) == 0
    await episodes.end(compared, second["id"], outcome=-1.0)
    found = await read_samples(compared)
    assert [[sample.reward for sample in found[one["id"]]] for one in (first, second)] == [[1.0, 1.0], [-1.0]]
    everything = [sample for samples in found.values() for sample in samples]
    assert {sample.group_id for sample in everything} == {key_of_group("ticket-7", None)}
    assert max(sample.ready_at for sample in everything) < row.deadline_at
    assert await assemble(compared.db, compared.settings) == 1


async def test_group_is_one_batch_however_many_turns_it_has(compared: Harness) -> None:
    """Batches of at most four samples, and ten turns of one group."""
    await attempt(compared, 3, 1.0)
    await attempt(compared, 7, -1.0)
    await curate(compared.db, compared.settings)
    assert await assemble(compared.db, compared.settings) == 1
    assert {sample.state for sample in await compared.all(Sample)} == {SampleState.BATCHED}
    claimed = await batch_claims.claim(compared.db, "a trainer", compared.settings)
    assert claimed is not None and len(claimed.batch.samples) == 10
    assert {(sample.group, sample.depth) for sample in claimed.batch.samples} == {
        (key_of_group("ticket-7", None), None)
    }
    assert len({sample.episode for sample in claimed.batch.samples}) == 2


async def test_feedback_on_a_turn_counts_for_the_whole_attempt(compared: Harness) -> None:
    first = await attempt(compared, 3)
    await attempt(compared, 1, 0.5)
    turns = [turn for turn in await compared.all(Turn) if turn.episode_id == first["id"]]
    await compared.vote(turns[1].id, "down", source={"id": "ada"})
    await episodes.end(compared, first["id"], outcome=1.0)
    samples = (await read_samples(compared))[first["id"]]
    assert [(sample.reward, sample.rater) for sample in samples] == 3 * [(0.0, "HUMAN/ada")]


@pytest.mark.parametrize("spread", ["last", "discounted"])
async def test_outcome_of_an_attempt_is_not_spread_over_its_turns(compared: Harness, spread: str) -> None:
    """Each turn has the reward of the whole attempt; spread, the first turn would have nothing of it."""
    own = {"sources": SOURCES, "spread": spread}
    assert (await compared.api.put("/v1/policies/shop/rewards", json=own)).status_code == 200
    await attempt(compared, 3, 1.0)
    await attempt(compared, 2, -1.0)
    found = await read_samples(compared)
    assert [[sample.reward for sample in samples] for samples in found.values()] == [3 * [1.0], 2 * [-1.0]]


async def test_outcome_of_an_episode_without_a_group_is_spread(compared: Harness) -> None:
    own = {"sources": SOURCES, "spread": "last"}
    assert (await compared.api.put("/v1/policies/shop/rewards", json=own)).status_code == 200
    await attempt(compared, 2, 1.0, group=None)
    [samples] = (await read_samples(compared)).values()
    assert [sample.reward for sample in samples] == [0.0, 1.0]


async def test_samples_do_not_hold_the_name_of_their_group(compared: Harness) -> None:
    """It may be personal, and the samples stay when the episodes are erased."""
    episode = await attempt(compared, 1, 1.0, group={"id": "john.doe@example.com", "size": 2})
    await read_samples(compared)
    assert (await compared.api.delete(f"/v1/episodes/{episode['id']}")).status_code in (200, 204)
    assert not any("john" in (sample.group_id or "") for sample in await compared.all(Sample))


async def test_attempts_of_another_start_version_are_a_group_of_their_own(compared: Harness) -> None:
    """And none of them waits for more of its own version."""
    first, second = [await attempt(compared, 1) for _ in range(2)]
    async with compared.db.write() as session:
        for episode, version in ((first, "ver-0123456789abcdef0123456789ab"), (second, "ver-1")):
            of_episode = update(Episode).where(Episode.id == episode["id"])
            await session.execute(of_episode.values(start_version_id=version))
    for episode in (first, second):
        await episodes.end(compared, episode["id"], outcome=1.0)
    found = await read_samples(compared)
    keys = [found[episode["id"]][0].group_id for episode in (first, second)]
    assert keys == [key_of_group("ticket-7", "ver-0123456789abcdef0123456789ab"), key_of_group("ticket-7", "ver-1")]
    assert keys[0] != keys[1]
    assert all(sample.ready_at < sample.created_at + 60 for [sample] in found.values())
    assert len(key_of_group(255 * "g", 48 * "v")) <= 300


async def test_lost_attempt_may_be_replaced(compared: Harness) -> None:
    """Abandoned attempts have no part in the statistics, and hold up the others while they may be replaced."""
    await attempt(compared, 1, 1.0)
    lost = await attempt(compared, 2)
    await episodes.end(compared, lost["id"], reason="abandoned")
    found = await read_samples(compared)
    latest = max(row.deadline_at for row in await compared.all(Episode))
    assert lost["id"] not in found and {sample.ready_at for [sample] in found.values()} == {latest + 600}
    await attempt(compared, 1, -1.0)
    found = await read_samples(compared)
    assert len(found) == 2 and all(sample.ready_at < latest for [sample] in found.values())


async def test_attempt_without_chats_ends_the_wait_of_the_others(compared: Harness) -> None:
    await attempt(compared, 1, 1.0)
    await attempt(compared, 1, 0.0)
    extra = await attempt(compared, 0)
    found = await read_samples(compared)
    assert all(sample.ready_at > (sample.created_at + 3000) for [sample] in found.values())
    await episodes.end(compared, extra["id"], reason="abandoned")
    found = await read_samples(compared)
    assert all(sample.ready_at < (sample.created_at + 3000) for [sample] in found.values())


async def test_returns_of_a_group_have_their_depth(compared: Harness) -> None:
    own = {"sources": SOURCES, "episode_credit": "return", "episode_discount": 0.5}
    assert (await compared.api.put("/v1/policies/shop/rewards", json=own)).status_code == 200
    await attempt(compared, 2, 1.0)
    await attempt(compared, 3, -1.0)
    await curate(compared.db, compared.settings)
    assert await assemble(compared.db, compared.settings) == 1
    claimed = await batch_claims.claim(compared.db, "a trainer", compared.settings)
    assert claimed is not None
    assert sorted((sample.depth, sample.reward) for sample in claimed.batch.samples) == [
        *((0, -0.25), (0, 0.5), (1, -0.5), (1, 1.0), (2, -1.0))
    ]


@pytest.mark.parametrize("algorithm", [{"type": "ppo"}, {"type": "dpo"}])
async def test_other_algorithms_have_groups_of_one_prompt(harness: Harness, algorithm: dict[str, Any]) -> None:
    harness.settings = harness.settings.replace({"algorithm": algorithm})
    await attempt(harness, 2, 1.0)
    found = await read_samples(harness)
    assert [sample.group_id for samples in found.values() for sample in samples] == [
        turn.completion_id for turn in await harness.all(Turn)
    ]
    assert all(sample.ready_at < sample.created_at + 60 for samples in found.values() for sample in samples)


async def test_turns_have_the_returns_and_the_states_that_gigpo_compares(compared: Harness) -> None:
    """Beside the reward of the whole attempt, with `episode_discount` 0.95."""
    compared.settings = compared.settings.replace({"algorithm": {"type": "gigpo"}})
    await attempt(compared, 3, 1.0)
    await attempt(compared, 1, -1.0)
    async with compared.db.write() as session:
        await session.execute(update(Turn).where(Turn.episode_step == 1).values(state_key="the door"))
    await curate(compared.db, compared.settings)
    assert await assemble(compared.db, compared.settings) == 1
    claimed = await batch_claims.claim(compared.db, "a trainer", compared.settings)
    assert claimed is not None
    samples = claimed.batch.samples
    assert sorted(sample.state_key or "" for sample in samples) == ["", "", "the door", "the door"]
    assert {(sample.reward, sample.depth) for sample in samples} == {(1.0, None), (-1.0, None)}
    assert sorted(sample.turn_return or 0.0 for sample in samples) == pytest.approx([-1.0, 0.95**2, 0.95, 1.0])


async def test_turn_gae_knows_what_each_turn_adds_and_continues(harness: Harness) -> None:
    """A thumb down on the second of three turns, with the outcome 1 and γ = ½."""
    own = {"sources": SOURCES, "episode_credit": "return", "episode_discount": 0.5}
    assert (await harness.api.put("/v1/policies/shop/rewards", json=own)).status_code == 200
    harness.settings = harness.settings.replace({"trainer.batch_size": 3, "raters.max_rater_share": 1.0})
    episode = await attempt(harness, 3)
    turns = sorted(await harness.all(Turn), key=lambda turn: turn.episode_step or 0)
    await harness.vote(turns[1].id, "down")
    await episodes.end(harness, episode["id"], outcome=1.0)
    await curate(harness.db, harness.settings)
    assert await assemble(harness.db, harness.settings) == 1
    claimed = await batch_claims.claim(harness.db, "a trainer", harness.settings)
    assert claimed is not None
    found = {sample.turn_id: sample for sample in claimed.batch.samples}
    samples = [found[turn.id] for turn in turns]
    assert [sample.turn_reward for sample in samples] == [0.0, -1.0, 1.0]
    assert [sample.reward for sample in samples] == [-0.25, -0.5, 1.0]
    assert [sample.parent for sample in samples] == [None, turns[0].id, turns[1].id]
    assert [sample.num_next for sample in samples] == [1, 1, 0]
