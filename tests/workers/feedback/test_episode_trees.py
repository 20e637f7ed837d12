"""Turns of an episode are rewarded by their returns: `rewards.episode_credit` "return", worked out by hand."""

import asyncio
import time
from typing import Any

import pytest

from app.chat.conversations import NOT_CONTINUED
from app.models import BatchState, Episode, Sample, SampleState, Turn, TurnState
from app.policies.locks import lock_policy
from app.training import batch_samples
from tests.support import episodes
from tests.support.deployment import Harness
from tests.support.trained_versions import create_batch
from workers.curate import curate
from workers.feedback.rewards import record_reward, update_turn_samples

REWARDS: dict[str, Any] = {"sources": [{"type": "explicit"}], "episode_credit": "return", "episode_discount": 0.5}
LIMITS = {"deadline_seconds": 3600}


@pytest.fixture
async def returns(harness: Harness) -> None:
    await use(harness)


async def use(harness: Harness, **fields: Any) -> None:
    answer = await harness.api.put("/v1/policies/shop/rewards", json=REWARDS | fields)
    assert answer.status_code == 200, answer.text


async def add(harness: Harness, episode: dict[str, Any], parent: Turn | None = None, **values: Any) -> Turn:
    """Add a chat to the episode that continues `parent`, token by token."""
    turns = [turn for turn in await harness.all(Turn) if turn.episode_id == episode["id"]]
    continued: dict[str, Any] = {}
    if parent is not None:
        continued = {"parent_id": parent.id, "prefix_reuse": "exact", "conversation_id": parent.conversation_id}
    place = {"episode_id": episode["id"], "episode_step": len(turns) + 1, "num_prompt_tokens": 3, **continued}
    return await harness.turn(**place | values)


async def line(harness: Harness, episode: dict[str, Any], length: int = 3) -> list[Turn]:
    turns: list[Turn] = []
    for _ in range(length):
        turns.append(await add(harness, episode, turns[-1] if turns else None, conversation_id="c"))
    return turns


async def rewards(harness: Harness) -> list[float | None]:
    """Curate, and return the rewards of the samples in the order of steps; None for a turn without one."""
    await curate(harness.db, harness.settings)
    samples = {sample.turn_id: sample for sample in await harness.all(Sample)}
    by_step = sorted(await harness.all(Turn), key=lambda turn: (turn.episode_step or 0, turn.choice_index))
    open_ones = {id for id, sample in samples.items() if sample.state != SampleState.DROPPED}
    return [samples[turn.id].reward if turn.id in open_ones else None for turn in by_step]


@pytest.mark.usefixtures("returns")
async def test_outcome_is_discounted_along_the_line(harness: Harness) -> None:
    episode = await episodes.create(harness)
    await line(harness, episode)
    await episodes.end(harness, episode["id"], outcome=1.0)
    assert await rewards(harness) == [0.25, 0.5, 1.0]
    assert {sample.rater for sample in await harness.all(Sample)} == {"CODE/episode"}


async def test_by_default_every_turn_has_the_outcome(harness: Harness) -> None:
    episode = await episodes.create(harness)
    await line(harness, episode)
    await episodes.end(harness, episode["id"], outcome=1.0)
    assert await rewards(harness) == [1.0, 1.0, 1.0]


@pytest.mark.usefixtures("returns")
async def test_feedback_on_a_turn_adds_to_the_outcome_and_reaches_the_turns_before_it(harness: Harness) -> None:
    episode = await episodes.create(harness)
    turns = await line(harness, episode)
    await harness.vote(turns[1].id, "down")
    await episodes.end(harness, episode["id"], outcome=1.0)
    # −1 + 0.5 · 1, of which the first turn has one half.
    assert await rewards(harness) == [-0.25, -0.5, 1.0]


@pytest.mark.usefixtures("returns")
async def test_feedback_on_a_turn_may_come_after_the_end(harness: Harness) -> None:
    """Until the sample is in a batch: what comes later changes neither it nor those that were trained with it."""
    episode = await episodes.create(harness)
    turns = await line(harness, episode)
    await episodes.end(harness, episode["id"], outcome=1.0)
    assert await rewards(harness) == [0.25, 0.5, 1.0]
    await harness.vote(turns[2].id, "down")
    assert await rewards(harness) == [0.0, 0.0, 0.0]
    await create_batch(harness, turns[0])
    await harness.vote(turns[2].id, "up")
    assert await rewards(harness) == [0.0, 1.0, 2.0]


@pytest.mark.usefixtures("returns")
async def test_branches_and_agents_have_returns_of_their_own(harness: Harness) -> None:
    """A planner calls a worker, and tries its first step twice; their chats alternate."""
    episode = await episodes.create(harness)
    plan = await add(harness, episode, agent="planner")
    work = await add(harness, episode, agent="worker")
    first = await add(harness, episode, plan, agent="planner")
    second = await add(harness, episode, plan, agent="planner")
    await add(harness, episode, work, agent="worker")
    await harness.vote(second.id, "down")
    await add(harness, episode, first, agent="planner")
    await episodes.end(harness, episode["id"], outcome=1.0)
    # The first try: 1, 0.5. The second: −1 + 1. The plan: 0.5 · (0.5 + 0) / 2. The worker: 0.5 and 1.
    assert await rewards(harness) == [0.125, 0.5, 0.5, 0.0, 1.0, 1.0]


@pytest.mark.usefixtures("returns")
async def test_return_goes_on_over_a_compaction(harness: Harness) -> None:
    episode = await episodes.create(harness)
    first = await add(harness, episode, conversation_id="c", num_prompt_tokens=50)
    second = await add(harness, episode, first, num_prompt_tokens=60)
    third = await add(harness, episode, second, prefix_reuse=NOT_CONTINUED, num_prompt_tokens=10)
    shown = (await harness.api.get(f"/v1/episodes/{episode['id']}")).json()["turns"]
    assert (shown[2]["edge"], shown[2]["parent_turn_id"]) == ("compaction", second.id)
    await harness.vote(third.id, "up")
    await episodes.end(harness, episode["id"], outcome=-1.0)
    await harness.vote(second.id, "up")
    # 1 − 1; 1 + 0.5 · 0; 0.5 · 1.
    assert await rewards(harness) == [0.5, 1.0, 0.0]


@pytest.mark.usefixtures("returns")
async def test_choices_that_were_not_taken_and_failed_replies_have_no_part(harness: Harness) -> None:
    episode = await episodes.create(harness)
    await add(harness, episode, request_sha256="same")  # and the agent began again, with the same request
    taken = await add(harness, episode, request_sha256="same")
    choice: dict[str, Any] = {"choice_index": 1, "completion_id": taken.completion_id, "request_sha256": "same"}
    await add(harness, episode, episode_step=2, **choice)
    await add(harness, episode, taken, state=TurnState.FAILED, exclusion_reason="the engine failed", episode_step=3)
    await add(harness, episode, taken, episode_step=4)
    await episodes.end(harness, episode["id"], outcome=1.0)
    assert await rewards(harness) == [None, 0.5, None, None, 1.0]


@pytest.mark.usefixtures("returns")
async def test_feedback_on_a_conversation_counts_for_its_last_turn(harness: Harness) -> None:
    episode = await episodes.create(harness)
    await line(harness, episode)
    body = {"kind": "score", "value": 0.5, "target": {"conversation_id": "c"}}
    assert (await harness.api.post("/v1/feedback", json=body)).status_code == 201
    await episodes.end(harness, episode["id"], outcome=1.0)
    assert await rewards(harness) == [0.375, 0.75, 1.5]


@pytest.mark.usefixtures("returns")
async def test_samples_of_an_open_episode_wait_for_its_end(harness: Harness) -> None:
    episode = await episodes.create(harness, limits=LIMITS)
    turns = await line(harness, episode, 2)
    await harness.vote(turns[1].id, "up", id="v-1")
    assert await rewards(harness) == [0.5, 1.0]
    [row] = await harness.all(Episode)
    assert {sample.ready_at for sample in await harness.all(Sample)} == {row.deadline_at + 600}
    [vote] = (await harness.api.get("/v1/feedback", params={"completion_id": turns[1].id})).json()["data"]
    assert (vote["outcome"]["state"], vote["outcome"]["waiting_for"]) == ("waiting", "episode_open")
    await episodes.end(harness, episode["id"], reason="completed")
    await rewards(harness)
    [row] = await harness.all(Episode)
    assert row.processed and row.ended_at is not None
    assert {sample.ready_at for sample in await harness.all(Sample)} == {row.ended_at + 600}, "an outcome may come"
    body = {"kind": "score", "value": -1.0, "target": {"episode_id": episode["id"]}}
    assert (await harness.api.post("/v1/feedback", json=body)).status_code == 201
    assert await rewards(harness) == [0.0, 0.0]
    assert all(sample.ready_at < row.ended_at + 600 for sample in await harness.all(Sample))


@pytest.mark.usefixtures("returns")
async def test_end_waits_for_replies_that_are_being_generated(harness: Harness) -> None:
    episode = await episodes.create(harness)
    await add(harness, episode, state=TurnState.OPEN)
    await episodes.end(harness, episode["id"], outcome=1.0)
    await curate(harness.db, harness.settings)
    assert not (await harness.get(Episode, episode["id"])).processed and not await harness.all(Sample)


@pytest.mark.usefixtures("returns")
async def test_returned_sample_has_the_feedback_that_came_meanwhile(harness: Harness) -> None:
    """On a later turn, in another conversation of the episode."""
    episode = await episodes.create(harness)
    first = await add(harness, episode, agent="x", conversation_id="conv-a", num_prompt_tokens=50)
    second = await add(harness, episode, first, agent="x", num_prompt_tokens=60)
    compacted: dict[str, Any] = {"agent": "x", "conversation_id": "conv-b", "num_prompt_tokens": 10}
    third = await add(harness, episode, created_at=time.time() + 60, **compacted)
    await harness.vote(first.id, "up")
    assert await rewards(harness) == [1.0, None, None]
    batch = await create_batch(harness, first)
    await harness.vote(third.id, "up")
    assert await rewards(harness) == [1.0, 0.5, 1.0]
    async with harness.db.write() as session:
        locked = await lock_policy(session, batch.policy_id)
        await batch_samples.break_up_batches(locked, [batch.id], BatchState.REFUSED, "a test")
    assert await rewards(harness) == [1.25, 0.5, 1.0]
    assert second.conversation_id != third.conversation_id


@pytest.mark.usefixtures("returns")
async def test_rewards_of_two_turns_may_come_at_the_same_time(harness: Harness) -> None:
    """Each changes the samples of the turns before it, which both would create."""
    episode = await episodes.create(harness)
    turns = await line(harness, episode)
    await episodes.end(harness, episode["id"])
    has_first = asyncio.Event()

    async def reward(turn: Turn, value: float) -> None:
        async with harness.db.write() as session:
            await record_reward(session, turn.id, "judge", value)
            await update_turn_samples(session, [turn.id], settings)
            has_first.set()
            await asyncio.sleep(0.3)  # the other one comes meanwhile

    sources = [*REWARDS["sources"], {"type": "rule", "name": "judge", "function": "ended"}]
    await use(harness, sources=sources)
    settings = harness.settings
    first = asyncio.create_task(reward(turns[1], 1.0))
    await has_first.wait()
    await asyncio.gather(first, reward(turns[2], -1.0))
    samples = {sample.turn_id: sample.reward for sample in await harness.all(Sample)}
    assert samples == {turns[0].id: 0.25, turns[1].id: 0.5, turns[2].id: -1.0}
