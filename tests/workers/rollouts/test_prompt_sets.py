"""Prompt sets: n replies of the live version to every prompt, verified immediately, and no prompt is sampled twice."""

import asyncio
import sys
import time
from types import ModuleType
from typing import Any

import pytest
from sqlalchemy import delete, update

from alignment.config.rollouts import RolloutsConfig
from app.models import (
    Audit,
    Batch,
    Dataset,
    DatasetRow,
    Deployment,
    Engine,
    LearningMode,
    Origin,
    Policy,
    Project,
    Reward,
    RolloutState,
    Sample,
    SampleState,
    VersionState,
    new_id,
)
from tests.support.deployment import Harness
from tests.support.rollout_rows import (
    create_plan,
    create_prompt_set,
    read_plan,
    read_rollouts,
    read_turns,
    run_rollouts,
)
from tests.support.scripted_engine import ScriptedEngine
from tests.support.updates import rate
from workers.rollouts import prompt_sets, rollout_queue
from workers.rollouts.sampler import sample_rollouts
from workers.training import batch_claims
from workers.training.assemble import assemble

SUMS = (("2 + 2?", "4"), ("3 + 4?", "7"), ("9 - 8?", "1"))


async def run_plan(harness: Harness, settings: Any = None, rounds: int = 10) -> Any:
    """Run the rollout stage until it has no work, with all samples marked as trained in between. Return the plan."""
    for _ in range(rounds):
        if not await sample_rollouts(harness.db, settings or harness.settings, "me"):
            break
        async with harness.db.write() as session:
            await session.execute(update(Sample).values(state=SampleState.TRAINED))
    return await read_plan(harness)


async def test_a_plan_samples_verifies_and_ends(harness: Harness, scripted: ScriptedEngine) -> None:
    await create_prompt_set(harness, *SUMS)
    scripted.reply_text = "I think it is 7."
    plan = await create_plan(harness, max_tokens=16, temperature=0.8)
    assert (plan["state"], plan["num_prompts"], plan["mean_reward"]) == ("running", 3, None)
    row = await run_plan(harness)
    assert (row.state, row.pass_number, row.position) == ("done", 1, 0)
    rows = await read_rollouts(harness)
    assert [(one.row_number, one.choice_index, one.reward) for one in rows] == [
        (0, 0, -1.0),
        (0, 1, -1.0),
        (1, 0, 1.0),
        (1, 1, 1.0),
        (2, 0, -1.0),
        (2, 1, -1.0),
    ]
    all_turns = await read_turns(harness)
    assert len({turn.completion_id for turn in all_turns}) == 3 and {turn.origin for turn in all_turns} == {
        "prompt_set"
    }
    assert all(
        turn.exclusion_reason is None and len(turn.logprobs or ()) == len(turn.output_ids or ()) > 0
        for turn in all_turns
    )
    assert {turn.sampling["temperature"] for turn in all_turns} == {0.8}
    assert {(reward.source, reward.reward_source) for reward in await harness.all(Reward)} == {("verifier", "verifier")}
    samples = {sample.turn_id: sample for sample in await harness.all(Sample)}
    assert {samples[turn.id].group_id for turn in all_turns} == {turn.completion_id for turn in all_turns}
    view = (await harness.api.get(f"/v1/policies/shop/rollouts/plans/{plan['id']}")).json()
    assert view["replies"]["done"] == 6 and view["mean_reward"] == pytest.approx(-1 / 3) and view["verified"] == 6
    assert view["replies"]["tokens"] == sum(len(turn.output_ids or ()) for turn in all_turns)
    assert [row.action for row in await harness.all(Audit) if row.subject == plan["id"]] == [
        "rollout_plan.created",
        "rollout_plan.done",
    ]
    assert (await harness.api.get("/v1/chat/completions")).json()["data"] == []
    stored = await harness.api.get(f"/v1/chat/completions/{all_turns[0].id}")
    thumb = await harness.vote(all_turns[0].id)
    assert (stored.status_code, thumb.status_code) == (404, 404)


async def test_a_group_is_ready_when_its_last_reply_is_verified(harness: Harness, scripted: ScriptedEngine) -> None:
    await create_prompt_set(harness, *SUMS[:1])
    settings = harness.settings.replace({"rollouts": RolloutsConfig(in_flight=1)})
    scripted.reply_text = "4"
    await create_plan(harness, n=4)
    await prompt_sets.advance_plans(harness.db, settings)
    scripted.is_blocked = lambda reply: len(scripted.requests) > 1
    running = asyncio.create_task(sample_rollouts(harness.db, settings, "me"))
    while not await harness.all(Sample):
        await asyncio.sleep(0.01)
    [sample] = await harness.all(Sample)
    assert sample.ready_at > sample.created_at + 300, "its group is not complete"
    scripted.is_blocked = lambda reply: False
    await running
    samples = await harness.all(Sample)
    assert len(samples) == 4 and len({one.ready_at for one in samples}) == 1
    assert samples[0].ready_at < sample.ready_at, "it waits for nothing more"


async def test_each_pass_samples_every_prompt(harness: Harness, scripted: ScriptedEngine) -> None:
    await create_prompt_set(harness, *SUMS[:2])
    await create_plan(harness, passes=3)
    row = await run_plan(harness)
    assert row.state == "done" and len(await read_rollouts(harness)) == 12
    assert {(one.pass_number, one.row_number) for one in await read_rollouts(harness)} == {
        (pass_number, number) for pass_number in range(3) for number in range(2)
    }


async def test_prompt_sets_keep_to_their_share_of_a_batch(harness: Harness, scripted: ScriptedEngine) -> None:
    """Prompt sets get four of the eight places, although their samples are older; chats get the others."""
    await create_prompt_set(harness, *SUMS)
    scripted.reply_text = "4"
    await create_plan(harness)
    await sample_rollouts(harness.db, harness.settings, "me")
    assert len(await harness.all(Sample)) == 4, "no more than the share of a batch"
    assert await assemble(harness.db, harness.settings) == 0, "the other places are for chats"
    await rate(harness, "+-+-+-")
    assert await assemble(harness.db, harness.settings) == 1
    by_origin = {turn.id: turn.origin for turn in await read_turns(harness)}
    batched = [by_origin[one.turn_id] for one in await harness.all(Sample) if one.batch_id is not None]
    assert sorted(batched) == ["chat"] * 4 + ["prompt_set"] * 4
    claimed = await batch_claims.claim(harness.db, "me", harness.settings)
    assert claimed is not None
    assert sorted(sample.reward for sample in claimed.batch.samples if sample.conversation is None)[-2:] == [1.0, 1.0]


async def test_prompt_sets_may_fill_a_batch(harness: Harness, scripted: ScriptedEngine) -> None:
    await create_prompt_set(harness, *SUMS, ("1 + 3?", "4"))
    scripted.reply_text = "4"
    settings = harness.settings.replace({"rollouts": RolloutsConfig(max_plan_share=1.0)})
    await create_plan(harness)
    await sample_rollouts(harness.db, settings, "me")
    assert await assemble(harness.db, settings) == 1
    [batch] = await harness.all(Batch)
    assert batch.num_samples == 8


async def test_a_long_queue_of_prompts_does_not_hide_chats(harness: Harness) -> None:
    """Create more replies to prompts than one query reads, all of them ready before any chat."""
    for number in range(12):
        first = new_id("chatcmpl")
        for index in range(16):
            id = first if index == 0 else new_id("chatcmpl")
            fields: dict[str, Any] = {"completion_id": first, "choice_index": index, "origin": Origin.PROMPT_SET}
            turn = await harness.turn(**fields | {"id": id})
            async with harness.db.write() as session:
                session.add(
                    Sample(
                        turn_id=turn.id,
                        policy_id=turn.policy_id,
                        version_id=turn.version_id,
                        reward=1.0,
                        group_id=first,
                        ready_at=float(number),
                    )
                )
    await rate(harness, "+-+-")
    settings = harness.settings.replace({"trainer.batch_size": 32, "trainer.max_batch_size": 32})
    assert await assemble(harness.db, settings) == 1
    by_origin = {turn.id: turn.origin for turn in await read_turns(harness)}
    batched = [by_origin[one.turn_id] for one in await harness.all(Sample) if one.batch_id is not None]
    assert batched.count("chat") == 4 and batched.count("prompt_set") == 16


async def test_prompts_per_version_are_limited_until_the_next_version(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    await create_prompt_set(harness, *SUMS)
    scripted.reply_text = "4"
    await create_plan(harness, prompts_per_version=1)
    for _ in range(2):
        await sample_rollouts(harness.db, harness.settings, "me")
        assert len(await read_rollouts(harness)) == 2
    version = await harness.version(VersionState.LIVE)
    assert version.adapter_name is not None
    scripted.adapters[version.adapter_name] = "x"
    async with harness.db.write() as session:
        (await session.get_one(Engine, "engine-0")).loaded = [version.adapter_name]
        await session.execute(update(Deployment).values(version_id=version.id))
    await sample_rollouts(harness.db, harness.settings, "me")
    assert [turn.version_id for turn in await read_turns(harness)].count(version.id) == 2 and len(
        await read_rollouts(harness)
    ) == 4
    async with harness.db.write() as session:  # no sample is left to train the next version on
        await session.execute(update(Sample).values(state=SampleState.DROPPED))
    await sample_rollouts(harness.db, harness.settings, "me")
    assert len(await read_rollouts(harness)) == 6, "the plan continues, because no sample is left to train on"


async def test_a_plan_is_paused_resumed_and_cancelled(harness: Harness, scripted: ScriptedEngine) -> None:
    await create_prompt_set(harness, *SUMS)
    scripted.reply_text = "4"
    plan = await create_plan(harness)
    plan_url = f"/v1/policies/shop/rollouts/plans/{plan['id']}"
    await prompt_sets.advance_plans(harness.db, harness.settings)
    assert (await harness.api.post(f"{plan_url}/pause", json={"reason": "lunch"})).json()["reason"] == "lunch"
    await sample_rollouts(harness.db, harness.settings, "me")
    assert {row.state for row in await read_rollouts(harness)} == {RolloutState.OPEN} and scripted.requests == []
    assert (await harness.api.post(f"{plan_url}/resume", json={})).json()["state"] == "running"
    await sample_rollouts(harness.db, harness.settings, "me")
    assert len(scripted.requests) == 4
    async with harness.db.write() as session:
        await session.execute(update(Sample).values(state=SampleState.TRAINED))
    await prompt_sets.advance_plans(harness.db, harness.settings)
    assert (await harness.api.post(f"{plan_url}/cancel", json={})).json()["state"] == "cancelled"
    await sample_rollouts(harness.db, harness.settings, "me")
    assert len(scripted.requests) == 4 and {row.reason for row in (await read_rollouts(harness))[4:]} == {
        rollout_queue.PLAN_ENDED
    }
    refused = await harness.api.post(f"{plan_url}/resume", json={})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "plan_ended")
    actions = [row.action for row in await harness.all(Audit) if row.subject == plan["id"]]
    assert actions == ["rollout_plan.created", "rollout_plan.paused", "rollout_plan.running", "rollout_plan.cancelled"]


async def test_after_a_worker_stops_no_prompt_is_sampled_twice(harness: Harness, scripted: ScriptedEngine) -> None:
    scripted.reply_text = "4"
    await create_prompt_set(harness, *SUMS[:2])
    await create_plan(harness)
    scripted.is_blocked = lambda reply: True
    stopped = asyncio.create_task(sample_rollouts(harness.db, harness.settings, "stopped"))
    while not scripted.running:
        await asyncio.sleep(0.01)
    stopped.cancel()
    await asyncio.gather(stopped, return_exceptions=True)
    scripted.is_blocked = lambda reply: False
    assert (await run_plan(harness)).state == "done", "the rollouts were handed over: no lease has to expire"
    rows = await read_rollouts(harness)
    assert [(row.row_number, row.choice_index, row.state) for row in rows] == [
        (number, index, RolloutState.DONE) for number in range(2) for index in range(2)
    ]
    assert len(await read_turns(harness)) == len(await harness.all(Reward)) == 4
    assert (max(row.attempt for row in rows), max(row.fence for row in rows)) == (1, 2), "a stop is no attempt"


async def test_workers_share_the_rollouts(harness: Harness, scripted: ScriptedEngine) -> None:
    await create_prompt_set(harness, *SUMS)
    await create_plan(harness, n=4)
    settings = harness.settings.replace({"rollouts": RolloutsConfig(in_flight=16, max_plan_share=1.0)})
    await asyncio.gather(
        *(
            sample_rollouts(
                harness.db, settings.replace({"trainer.batch_size": 64, "trainer.max_batch_size": 64}), f"w-{n}"
            )
            for n in range(3)
        )
    )
    rows = await read_rollouts(harness)
    assert len({(row.row_number, row.choice_index) for row in rows}) == len(rows) == 12
    assert len(scripted.requests) == 12 and {row.state for row in rows} == {RolloutState.DONE}


async def test_a_plan_fails_when_its_dataset_is_deleted(harness: Harness, scripted: ScriptedEngine) -> None:
    dataset = await create_prompt_set(harness, *SUMS)
    await create_plan(harness)
    await prompt_sets.advance_plans(harness.db, harness.settings)
    async with harness.db.write() as session:
        await session.execute(delete(DatasetRow).where(DatasetRow.dataset_id == dataset.id))
        await session.execute(delete(Dataset))
    row = await run_plan(harness)
    assert (row.state, row.reason) == ("failed", "Dataset 'sums' was deleted.") and scripted.requests == []
    assert {one.state for one in await read_rollouts(harness)} == {RolloutState.SKIPPED}


async def test_a_plan_fails_when_all_replies_fail(harness: Harness, scripted: ScriptedEngine) -> None:
    await create_prompt_set(harness, *SUMS * 3)
    await create_plan(harness)
    scripted.refuse_status = 400
    row = await run_plan(harness)
    assert row.state == "failed" and "the script says no" in row.reason
    assert len(await read_rollouts(harness)) <= 12


@pytest.mark.parametrize("reason", ["halted", "no consent"])
async def test_a_plan_waits_or_fails_where_training_is_not_allowed(
    harness: Harness, scripted: ScriptedEngine, reason: str
) -> None:
    await create_prompt_set(harness, *SUMS)
    await create_plan(harness)
    async with harness.db.write() as session:
        if reason == "halted":
            await session.execute(update(Policy).values(mode=LearningMode.HALTED))
        else:
            await session.execute(update(Project).values(train=False))
    row = await run_plan(harness)
    assert row.state == ("running" if reason == "halted" else "failed") and scripted.requests == []
    refused = await harness.api.post(
        "/v1/policies/shop/rollouts/plans", json={"dataset": "sums", "verifier": {"type": "number"}}
    )
    assert refused.status_code == (201 if reason == "halted" else 409)


@pytest.mark.parametrize("behaviour", ["raises", "hangs", "returns 2", "exits", "returns nothing"])
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_custom_verifier_may_fail_in_any_way(
    harness: Harness, scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, behaviour: str
) -> None:
    def check(attempt: Any) -> Any:
        if behaviour == "hangs":
            time.sleep(1)
        if behaviour == "exits":
            sys.exit("bye")
        if behaviour == "raises":
            raise RuntimeError("boom")
        return 2 if behaviour == "returns 2" else None

    module = ModuleType("shop_checks")
    module.check = check  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "shop_checks", module)
    if behaviour == "hangs":
        monkeypatch.setattr("workers.rollouts.prompt_sets.VERIFIER_SECONDS", 0.1)
    config = RolloutsConfig(verifiers={"mine": "shop_checks:check"})
    settings = harness.settings.replace({"rollouts": config})
    await create_prompt_set(harness, SUMS[0])
    harness.api._transport.app.services.put(settings)  # type: ignore[attr-defined]
    await create_plan(harness, verifier={"type": "custom", "name": "mine"})
    row = await run_plan(harness, settings)
    assert row.state == "done" and await harness.all(Reward) == [] and await harness.all(Sample) == []
    [reason] = {one.reason for one in await read_rollouts(harness)}
    messages = {"raises": "boom", "hangs": "more than 0.1 s", "returns 2": "'2'", "exits": "bye"}
    assert messages.get(behaviour, "no opinion") in (reason or "")


async def test_metrics_count_rollouts_separately(harness: Harness, scripted: ScriptedEngine) -> None:
    await create_prompt_set(harness, SUMS[0])
    await create_plan(harness)
    await run_rollouts(harness, harness.settings)
    page = (await harness.api.get("/metrics")).text
    assert 'attune_rollouts_total{origin="prompt_set",policy="shop",project="default",state="done"} 2.0' in page
    assert "attune_turns_total{" not in page
