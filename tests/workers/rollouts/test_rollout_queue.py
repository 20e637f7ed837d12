"""Rollouts are claimed while engines have spare capacity and the budget allows it; others wait or are skipped."""

import asyncio

import pytest
from sqlalchemy import update

from app.models import (
    Engine,
    Rollout,
    RolloutState,
    Turn,
    TurnState,
    VersionState,
)
from tests.support.deployment import Harness
from tests.support.rollout_rows import (
    chat,
    plan_group_samples,
    read_group_samples,
    read_turns,
    run_rollouts,
    with_group_sampling,
)
from tests.support.scripted_engine import Reply, ScriptedEngine
from workers.curate import curate
from workers.reconcile import reconcile
from workers.release.adapter_sync import unload_unused_adapters
from workers.rollouts import rollout_queue
from workers.rollouts.sampler import sample_rollouts


async def test_a_version_that_no_engine_has_loaded_is_not_sampled(harness: Harness, scripted: ScriptedEngine) -> None:
    settings = with_group_sampling(harness, "http://127.0.0.1:9", extra_replies=2)
    version = await harness.version(VersionState.LIVE)
    await harness.turn(version, sampling={"max_tokens": 8, "temperature": 1.0})
    await plan_group_samples(harness, settings)
    await unload_unused_adapters(harness.db, settings)
    assert {row.reason for row in await run_rollouts(harness, settings)} == {rollout_queue.VERSION_GONE}
    async with harness.db.write() as session:
        assert version.adapter_name is not None
        (await session.get_one(Engine, "engine-0")).loaded = [version.adapter_name]
    await harness.turn(version, sampling={"max_tokens": 8, "temperature": 1.0})
    states = [row.reason for row in await run_rollouts(harness, settings)]
    assert states == [rollout_queue.VERSION_GONE] * 4, (
        "the engine's row lists the version, but the engine does not have it"
    )
    assert {turn.state for turn in await read_group_samples(harness)} == {TurnState.ABORTED}


async def test_without_an_engine_rollouts_wait_and_no_attempt_counts(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    settings = with_group_sampling(harness, "http://127.0.0.1:9", extra_replies=1)
    await chat(harness)
    async with harness.db.write() as session:
        (await session.get_one(Engine, "engine-0")).state = "down"
    [row] = await run_rollouts(harness, settings)
    assert (row.state, row.attempt) == (RolloutState.OPEN, 0)


async def test_chats_have_priority(harness: Harness, scripted: ScriptedEngine) -> None:
    settings = with_group_sampling(harness, "http://127.0.0.1:9", extra_replies=2)
    await chat(harness)
    scripted.is_blocked = lambda reply: True
    open_chat = asyncio.create_task(chat(harness))
    while not [turn for turn in await read_turns(harness) if turn.state == TurnState.OPEN]:
        await asyncio.sleep(0.01)
    await plan_group_samples(harness, settings)
    assert await rollout_queue.claim_rollouts(harness.db, settings, "me") == [], "a chat is open"
    assert (
        len(
            await rollout_queue.claim_rollouts(
                harness.db, with_group_sampling(harness, "http://127.0.0.1:9", max_open_chats=1), "me"
            )
        )
        == 2
    )
    scripted.is_blocked = lambda reply: False
    await open_chat


async def test_the_number_of_running_rollouts_is_limited(harness: Harness, scripted: ScriptedEngine) -> None:
    settings = with_group_sampling(harness, "http://127.0.0.1:9", extra_replies=5, in_flight=2)
    await chat(harness)
    max_running = 0

    def is_blocked(reply: Reply) -> bool:
        """Block replies until two run at the same time, and the fifth reply never."""
        nonlocal max_running
        max_running = max(max_running, len(scripted.running))
        return max_running < 2

    scripted.seconds_per_token, scripted.is_blocked = 0.02, is_blocked
    await curate(harness.db, settings)
    assert await sample_rollouts(harness.db, settings, "me") == 5 and max_running == 2


async def test_the_hourly_budget_is_not_exceeded(harness: Harness, scripted: ScriptedEngine) -> None:
    length = 9  # tokens of the scripted reply, its end included
    settings = with_group_sampling(
        harness, "http://127.0.0.1:9", extra_replies=2, group_sampling={"tokens_per_hour": 4 * length}
    )
    for _ in range(4):
        await chat(harness, max_tokens=length)
    rows = await run_rollouts(harness, settings)
    assert [row.state for row in rows] == [RolloutState.DONE] * 4 and sum(row.tokens for row in rows) <= 4 * length
    await chat(harness, max_tokens=length)
    assert len(await run_rollouts(harness, settings)) == 4, "no more rollouts are created"
    async with harness.db.write() as session:
        await session.execute(update(Rollout).values(settled_at=Rollout.settled_at - 3601))
    await chat(harness, max_tokens=length)
    assert len(await run_rollouts(harness, settings)) == 6


async def test_a_group_sample_that_may_exceed_the_budget_is_skipped(harness: Harness, scripted: ScriptedEngine) -> None:
    settings = with_group_sampling(
        harness, "http://127.0.0.1:9", extra_replies=1, group_sampling={"tokens_per_hour": 100}
    )
    await chat(harness, max_tokens=101)
    [row] = await run_rollouts(harness, settings)
    assert (row.state, row.reason, row.tokens) == (RolloutState.SKIPPED, rollout_queue.OUT_OF_BUDGET, 0)


async def test_expired_group_samples_are_skipped(harness: Harness, scripted: ScriptedEngine) -> None:
    settings = with_group_sampling(
        harness, "http://127.0.0.1:9", extra_replies=1, group_sampling={"window_seconds": 50}
    )
    chat_turn = await chat(harness)
    await harness.vote(chat_turn.id)
    await plan_group_samples(harness, settings)
    async with harness.db.write() as session:
        await session.execute(update(Rollout).values(expires_at=0.0))
    [row] = await run_rollouts(harness, settings)
    assert (row.state, row.reason) == (RolloutState.SKIPPED, rollout_queue.EXPIRED) and len(scripted.requests) == 1
    assert (await read_group_samples(harness))[0].state == TurnState.ABORTED


async def test_the_reconciler_keeps_rollouts_open_and_enqueues_the_task(
    harness: Harness, scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = with_group_sampling(harness, "http://127.0.0.1:9", extra_replies=1)
    await chat(harness)
    await plan_group_samples(harness, settings)
    async with harness.db.write() as session:
        await session.execute(update(Turn).values(created_at=0.0))
    tasks: list[str] = []
    monkeypatch.setattr(harness.db, "_enqueue", tasks.extend)
    await reconcile(harness.db, settings)
    assert [turn.state for turn in await read_group_samples(harness)] == [TurnState.OPEN] and "rollout" in tasks
