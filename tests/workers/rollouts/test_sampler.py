"""Attempts at rollouts: each reply is recorded once, failed attempts are retried, and changes are checked first."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import update

from app.models import (
    Project,
    Rollout,
    RolloutState,
    Sample,
    SampleState,
    TurnState,
)
from tests.support.deployment import Harness
from tests.support.judgements import ScriptedEndpoint, run_judging
from tests.support.rollout_rows import (
    chat,
    make_rollouts_due,
    plan_group_samples,
    read_group_samples,
    read_turns,
    reward_by_id,
    run_rollout_job,
    run_rollouts,
    with_group_sampling,
)
from tests.support.scripted_engine import ScriptedEngine
from workers.queue.leased_job import WORKER_LOST
from workers.rollouts import rollout_queue, sampler
from workers.rollouts.sampler import sample_rollouts


async def test_withdrawn_consent_applies_to_the_group_samples(harness: Harness, scripted: ScriptedEngine) -> None:
    with ScriptedEndpoint(reward_by_id).serve() as url:
        settings = with_group_sampling(harness, url, in_flight=1)
        chat_turn = await chat(harness)
        await plan_group_samples(harness, settings)
        [(rollout, engine)] = await rollout_queue.claim_rollouts(harness.db, settings, "me")
        body = {"metadata": {"attune_train": "false"}}
        assert (await harness.api.post(f"/v1/chat/completions/{chat_turn.id}", json=body)).status_code == 200
        assert {row.state for row in await harness.all(Rollout)} == {RolloutState.SKIPPED}
        await run_rollout_job(harness, settings, rollout, engine)
        await run_judging(harness, settings)
    assert len(scripted.requests) == 1 or {turn.exclusion_reason for turn in await read_group_samples(harness)} == {
        "no consent to train"
    }
    assert await harness.all(Sample) == [] and {turn.output_ids for turn in await read_group_samples(harness)} == {None}


@pytest.mark.parametrize("change", ["project", "frozen", "turned off"])
async def test_a_change_before_sampling_skips_the_rollout(
    harness: Harness, scripted: ScriptedEngine, change: str
) -> None:
    settings = with_group_sampling(harness, "http://127.0.0.1:9")
    chat_turn = await chat(harness)
    await harness.vote(chat_turn.id)
    await plan_group_samples(harness, settings)
    async with harness.db.write() as session:
        if change == "project":
            await session.execute(update(Project).values(train=False))
        elif change == "frozen":
            await session.execute(update(Sample).values(state=SampleState.TRAINED))
    if change == "turned off":
        settings = with_group_sampling(harness, "http://127.0.0.1:9", extra_replies=0)
    await sample_rollouts(harness.db, settings, "me")
    assert {row.state for row in await harness.all(Rollout)} == {RolloutState.SKIPPED} and len(scripted.requests) == 1


async def test_different_prompt_ids_exclude_the_turn(harness: Harness, scripted: ScriptedEngine) -> None:
    with ScriptedEndpoint(reward_by_id).serve() as url:
        settings = with_group_sampling(harness, url, extra_replies=1)
        await chat(harness)
        await plan_group_samples(harness, settings)
        scripted.reported_prompt_ids = [9, 9]
        await run_rollouts(harness, settings)
        [group_sample] = await read_group_samples(harness)
        assert (group_sample.state, group_sample.exclusion_reason) == (TurnState.DONE, sampler.PROMPT_MISMATCH)
        await run_judging(harness, settings)
    assert {row.turn_id: row.state for row in await harness.all(Sample)}[group_sample.id] == SampleState.DROPPED


async def test_a_rollout_on_a_hanging_engine_fails_after_three_attempts(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    settings = with_group_sampling(harness, "http://127.0.0.1:9", extra_replies=1, timeout_seconds=3.0)
    chat_turn = await chat(harness)
    await harness.vote(chat_turn.id)
    scripted.is_blocked = lambda reply: True
    for attempt in (1, 2):
        [row] = await run_rollouts(harness, settings)
        assert (row.state, row.attempt, row.tokens) == (RolloutState.OPEN, attempt, 0)
        assert row.heartbeat_at is not None and row.due_at > row.heartbeat_at + 4
        assert row.reason == "the engine took more than 3 s"
        await make_rollouts_due(harness)
    [row] = await run_rollouts(harness, settings)
    assert (row.state, row.attempt) == (RolloutState.FAILED, 3)
    rids = [body["rid"] for body in scripted.requests[1:]]
    assert len(set(rids)) == 3 and {len(rid) for rid in rids} == {len(chat_turn.id)} and scripted.aborted >= set(rids)
    [sample] = await harness.all(Sample)
    assert chat_turn.finished_at is not None
    assert sample.ready_at < chat_turn.finished_at + 90, "the chat's sample no longer waits for it"


@pytest.mark.parametrize(("switch", "value"), [("refuse_status", 500), ("drop_after_tokens", 2), ("hang", True)])
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_failed_attempt_is_retried(harness: Harness, scripted: ScriptedEngine, switch: str, value: Any) -> None:
    settings = with_group_sampling(harness, "http://127.0.0.1:9", extra_replies=1)
    short_timeout = with_group_sampling(harness, "http://127.0.0.1:9", extra_replies=1, timeout_seconds=0.5)
    await chat(harness)
    setattr(scripted, switch, value)
    [row] = await run_rollouts(harness, short_timeout)
    assert (row.state, row.attempt) == (RolloutState.OPEN, 1) and row.reason
    setattr(scripted, switch, type(scripted)().__getattribute__(switch))
    await make_rollouts_due(harness)
    [row] = await run_rollouts(harness, settings)
    assert (row.state, row.attempt) == (RolloutState.DONE, 2)


async def test_a_refused_rollout_is_not_retried(harness: Harness, scripted: ScriptedEngine) -> None:
    settings = with_group_sampling(harness, "http://127.0.0.1:9", extra_replies=1)
    await chat(harness)
    scripted.refuse_status = 400
    [row] = await run_rollouts(harness, settings)
    assert (row.state, row.attempt, row.reason) == (RolloutState.FAILED, 1, "the script says no")


async def test_after_a_worker_stops_another_one_takes_over_and_there_is_one_turn(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    settings = with_group_sampling(harness, "http://127.0.0.1:9", extra_replies=1)
    await chat(harness)
    await plan_group_samples(harness, settings)
    [(rollout, engine)] = await rollout_queue.claim_rollouts(harness.db, settings, "stopped")
    first_id = rollout.id[:-2] + "01"
    scripted.is_blocked = lambda reply: reply.body["rid"] == first_id
    first_job = asyncio.create_task(run_rollout_job(harness, settings, rollout, engine))
    while first_id not in scripted.running:
        await asyncio.sleep(0.01)
    assert await rollout_queue.claim_rollouts(harness.db, settings, "me") == [], "the lease has not expired"
    await make_rollouts_due(harness)  # its lease expires
    [row] = await run_rollouts(harness, settings)
    assert (row.state, row.attempt, row.fence) == (RolloutState.DONE, 2, 2)
    assert await first_job == 0, "the first job lost its lease"
    [group_sample] = await read_group_samples(harness)
    assert (
        len(await read_turns(harness)) == 2
        and len(group_sample.logprobs or ()) == len(group_sample.output_ids or ()) > 0
    )
    assert first_id in scripted.aborted, "the engine does not continue a lost job"


async def test_a_rollout_whose_workers_stop_every_time_fails(harness: Harness, scripted: ScriptedEngine) -> None:
    settings = with_group_sampling(harness, "http://127.0.0.1:9", extra_replies=1)
    await chat(harness)
    await plan_group_samples(harness, settings)
    for _ in range(3):
        assert len(await rollout_queue.claim_rollouts(harness.db, settings, "stopped")) == 1
        await make_rollouts_due(harness)
    [row] = await run_rollouts(harness, settings)
    assert row.state == RolloutState.FAILED and row.reason == WORKER_LOST.format(3)
    assert len(scripted.requests) == 1
