"""Prompt sets: every prompt asked n times of the version that serves, verified at once, and never asked twice."""

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
from tests.support.rollout_rows import due, plan, planned, prompts, rolled, rollouts, turns
from tests.support.scripted_engine import ScriptedEngine
from tests.workers.training.test_assemble import rate
from workers.rollouts import prompt_sets, queue
from workers.rollouts.sample import roll_out
from workers.training import batches
from workers.training.assemble import assemble

SUMS = (("2 + 2?", "4"), ("3 + 4?", "7"), ("9 - 8?", "1"))


async def rolling(harness: Harness, settings: Any = None, rounds: int = 10) -> Any:
    """Until nothing more is settled; what waits is taken for learned from."""
    for _ in range(rounds):
        if not await roll_out(harness.db, settings or harness.settings, "me"):
            break
        async with harness.db.write() as session:
            await session.execute(update(Sample).values(state=SampleState.TRAINED))
    return await planned(harness)


async def test_a_set_is_asked_verified_and_done(harness: Harness, scripted: ScriptedEngine) -> None:
    await prompts(harness, *SUMS)
    scripted.say = "I think it is 7."
    told = await plan(harness, max_tokens=16, temperature=0.8)
    assert (told["state"], told["num_prompts"], told["mean_reward"]) == ("running", 3, None)
    row = await rolling(harness)
    assert (row.state, row.pass_number, row.position) == ("done", 1, 0)
    rows = await rollouts(harness)
    assert [(one.row_number, one.choice_index, one.reward) for one in rows] == [
        (0, 0, -1.0),
        (0, 1, -1.0),
        (1, 0, 1.0),
        (1, 1, 1.0),
        (2, 0, -1.0),
        (2, 1, -1.0),
    ]
    spoken = await turns(harness)
    assert len({turn.completion_id for turn in spoken}) == 3 and {turn.origin for turn in spoken} == {"prompt_set"}
    assert all(turn.exclusion_reason is None and len(turn.logprobs) == len(turn.output_ids) > 0 for turn in spoken)
    assert {turn.sampling["temperature"] for turn in spoken} == {0.8}
    assert {(reward.source, reward.origin) for reward in await harness.all(Reward)} == {("verifier", "verifier")}
    samples = {sample.turn_id: sample for sample in await harness.all(Sample)}
    assert {samples[turn.id].group_id for turn in spoken} == {turn.completion_id for turn in spoken}
    view = (await harness.api.get(f"/v1/policies/shop/rollouts/plans/{told['id']}")).json()
    assert view["replies"]["done"] == 6 and view["mean_reward"] == pytest.approx(-1 / 3) and view["verified"] == 6
    assert view["replies"]["tokens"] == sum(len(turn.output_ids) for turn in spoken)
    assert [row.action for row in await harness.all(Audit) if row.subject == told["id"]] == ["create plan", "plan done"]
    assert (await harness.api.get("/v1/chat/completions")).json()["data"] == []
    gone = await harness.api.get(f"/v1/chat/completions/{spoken[0].id}")
    thumb = await harness.thumb(spoken[0].id)
    assert (gone.status_code, thumb.status_code) == (404, 404)


async def test_a_group_is_ripe_when_its_last_reply_is_verified(harness: Harness, scripted: ScriptedEngine) -> None:
    await prompts(harness, *SUMS[:1])
    settings = harness.settings.model_copy(update={"rollouts": RolloutsConfig(in_flight=1)})
    await plan(harness, n=4)
    await prompt_sets.advance(harness.db, settings)
    scripted.held = lambda reply: len(scripted.heard) > 1
    running = asyncio.create_task(roll_out(harness.db, settings, "me"))
    while not await harness.all(Sample):
        await asyncio.sleep(0.01)
    [sample] = await harness.all(Sample)
    assert sample.ready_at > time.time() + 300, "its group samples are being made"
    scripted.held = lambda reply: False
    await running
    samples = await harness.all(Sample)
    assert len(samples) == 4 and len({one.ready_at for one in samples}) == 1
    assert samples[0].ready_at <= time.time() + 1


async def test_passes_go_over_the_set_again(harness: Harness, scripted: ScriptedEngine) -> None:
    await prompts(harness, *SUMS[:2])
    await plan(harness, passes=3)
    row = await rolling(harness)
    assert row.state == "done" and len(await rollouts(harness)) == 12
    assert {(one.pass_number, one.row_number) for one in await rollouts(harness)} == {
        (again, number) for again in range(3) for number in range(2)
    }


async def test_prompt_sets_keep_to_their_places_and_crowd_nobody_out(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    """Four of the eight places are theirs, though they were first; people get the others."""
    await prompts(harness, *SUMS)
    scripted.say = "4"
    await plan(harness)
    await roll_out(harness.db, harness.settings, "me")
    assert len(await harness.all(Sample)) == 4, "no more is asked than a batch has room for"
    assert await assemble(harness.db, harness.settings) == 0, "the other places are people's"
    await rate(harness, "+-+-+-")
    assert await assemble(harness.db, harness.settings) == 1
    by_origin = {turn.id: turn.origin for turn in await turns(harness)}
    taken = [by_origin[one.turn_id] for one in await harness.all(Sample) if one.batch_id is not None]
    assert sorted(taken) == ["chat"] * 4 + ["prompt_set"] * 4
    claimed = await batches.claim(harness.db, "me", harness.settings)
    assert claimed is not None
    assert sorted(sample.reward for sample in claimed.batch.samples if sample.conversation is None)[-2:] == [1.0, 1.0]


async def test_a_policy_that_nobody_talks_to_may_give_them_the_whole_batch(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    await prompts(harness, *SUMS, ("1 + 3?", "4"))
    scripted.say = "4"
    settings = harness.settings.model_copy(update={"rollouts": RolloutsConfig(max_plan_share=1.0)})
    await plan(harness)
    await roll_out(harness.db, settings, "me")
    assert await assemble(harness.db, settings) == 1
    [batch] = await harness.all(Batch)
    assert batch.num_samples == 8


async def test_people_are_not_hidden_behind_a_long_line_of_prompts(harness: Harness) -> None:
    """More replies to prompts than a query looks at, all of them riper than anybody's chat."""
    for number in range(12):
        first = new_id("chatcmpl")
        for place in range(16):
            id = first if place == 0 else new_id("chatcmpl")
            fields = {"completion_id": first, "choice_index": place, "origin": Origin.PROMPT_SET}
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
    settings = harness.settings.model_copy(update={"batch_size": 32})
    assert await assemble(harness.db, settings) == 1
    by_origin = {turn.id: turn.origin for turn in await turns(harness)}
    taken = [by_origin[one.turn_id] for one in await harness.all(Sample) if one.batch_id is not None]
    assert taken.count("chat") == 4 and taken.count("prompt_set") == 16


async def test_a_version_is_asked_so_many_prompts_and_then_the_next_one(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    await prompts(harness, *SUMS)
    await plan(harness, prompts_per_version=1)
    for _ in range(2):
        await roll_out(harness.db, harness.settings, "me")
        assert len(await rollouts(harness)) == 2
    version = await harness.version(VersionState.LIVE)
    scripted.adapters[version.adapter_name] = "x"
    async with harness.db.write() as session:
        (await session.get_one(Engine, "engine-0")).loaded = [version.adapter_name]
        await session.execute(update(Deployment).values(version_id=version.id))
    await roll_out(harness.db, harness.settings, "me")
    assert [turn.version_id for turn in await turns(harness)].count(version.id) == 2 and len(
        await rollouts(harness)
    ) == 4
    async with harness.db.write() as session:  # nothing of it was left to make a version of
        await session.execute(update(Sample).values(state=SampleState.DROPPED))
    await roll_out(harness.db, harness.settings, "me")
    assert len(await rollouts(harness)) == 6, "so it goes on all the same"


async def test_it_is_paused_resumed_and_cancelled(harness: Harness, scripted: ScriptedEngine) -> None:
    await prompts(harness, *SUMS)
    told = await plan(harness)
    at = f"/v1/policies/shop/rollouts/plans/{told['id']}"
    await prompt_sets.advance(harness.db, harness.settings)
    assert (await harness.api.post(f"{at}/pause", json={"reason": "lunch"})).json()["reason"] == "lunch"
    await roll_out(harness.db, harness.settings, "me")
    assert {row.state for row in await rollouts(harness)} == {RolloutState.OPEN} and scripted.heard == []
    assert (await harness.api.post(f"{at}/resume", json={})).json()["state"] == "running"
    await roll_out(harness.db, harness.settings, "me")
    assert len(scripted.heard) == 4
    async with harness.db.write() as session:
        await session.execute(update(Sample).values(state=SampleState.TRAINED))
    await prompt_sets.advance(harness.db, harness.settings)
    assert (await harness.api.post(f"{at}/cancel", json={})).json()["state"] == "cancelled"
    await roll_out(harness.db, harness.settings, "me")
    assert len(scripted.heard) == 4 and {row.reason for row in (await rollouts(harness))[4:]} == {queue.PLAN_ENDED}
    again = await harness.api.post(f"{at}/resume", json={})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "plan_ended")
    actions = [row.action for row in await harness.all(Audit) if row.subject == told["id"]]
    assert actions == ["create plan", "pause plan", "resume plan", "cancel plan"]


async def test_who_dies_between_asking_and_settling_asks_nobody_twice(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    await prompts(harness, *SUMS[:2])
    await plan(harness)
    scripted.held = lambda reply: True
    dying = asyncio.create_task(roll_out(harness.db, harness.settings, "the dead"))
    while not scripted.running:
        await asyncio.sleep(0.01)
    dying.cancel()
    await asyncio.gather(dying, return_exceptions=True)
    scripted.held = lambda reply: False
    await due(harness)
    assert (await rolling(harness)).state == "done"
    rows = await rollouts(harness)
    assert [(row.row_number, row.choice_index, row.state) for row in rows] == [
        (number, place, RolloutState.DONE) for number in range(2) for place in range(2)
    ]
    assert len(await turns(harness)) == len(await harness.all(Reward)) == 4 and max(row.attempt for row in rows) == 2


async def test_two_workers_take_turns(harness: Harness, scripted: ScriptedEngine) -> None:
    await prompts(harness, *SUMS)
    await plan(harness, n=4)
    wide = harness.settings.model_copy(update={"rollouts": RolloutsConfig(in_flight=16, max_plan_share=1.0)})
    await asyncio.gather(
        *(roll_out(harness.db, wide.model_copy(update={"batch_size": 64}), f"w-{n}") for n in range(3))
    )
    rows = await rollouts(harness)
    assert len({(row.row_number, row.choice_index) for row in rows}) == len(rows) == 12
    assert len(scripted.heard) == 12 and {row.state for row in rows} == {RolloutState.DONE}


async def test_a_dataset_that_goes_takes_its_plan_along(harness: Harness, scripted: ScriptedEngine) -> None:
    dataset = await prompts(harness, *SUMS)
    await plan(harness)
    await prompt_sets.advance(harness.db, harness.settings)
    async with harness.db.write() as session:
        await session.execute(delete(DatasetRow).where(DatasetRow.dataset_id == dataset.id))
        await session.execute(delete(Dataset))
    row = await rolling(harness)
    assert (row.state, row.reason) == ("failed", "Dataset 'sums' is gone.") and scripted.heard == []
    assert {one.state for one in await rollouts(harness)} == {RolloutState.SKIPPED}


async def test_an_engine_that_always_fails_ends_the_plan(harness: Harness, scripted: ScriptedEngine) -> None:
    await prompts(harness, *SUMS * 3)
    await plan(harness)
    scripted.refuse = 400
    row = await rolling(harness)
    assert row.state == "failed" and "the script says no" in row.reason
    assert len(await rollouts(harness)) <= 12


@pytest.mark.parametrize("why", ["halted", "no consent"])
async def test_it_waits_or_ends_where_nothing_may_be_learned(
    harness: Harness, scripted: ScriptedEngine, why: str
) -> None:
    await prompts(harness, *SUMS)
    await plan(harness)
    async with harness.db.write() as session:
        if why == "halted":
            await session.execute(update(Policy).values(mode=LearningMode.HALTED))
        else:
            await session.execute(update(Project).values(train=False))
    row = await rolling(harness)
    assert row.state == ("running" if why == "halted" else "failed") and scripted.heard == []
    refused = await harness.api.post(
        "/v1/policies/shop/rollouts/plans", json={"dataset": "sums", "verifier": {"type": "number"}}
    )
    assert refused.status_code == (201 if why == "halted" else 409)


@pytest.mark.parametrize("does", ["raises", "hangs", "says 2", "exits", "has nothing to say"])
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_verifier_of_ones_own_may_do_what_it_likes(
    harness: Harness, scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, does: str
) -> None:
    def check(attempt: Any) -> Any:
        if does == "hangs":
            time.sleep(1)
        if does == "exits":
            sys.exit("bye")
        if does == "raises":
            raise RuntimeError("boom")
        return 2 if does == "says 2" else None

    module = ModuleType("shop_checks")
    module.check = check  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "shop_checks", module)
    if does == "hangs":
        monkeypatch.setattr("workers.rollouts.verify.SECONDS", 0.1)
    config = RolloutsConfig(verifiers={"mine": "shop_checks:check"})
    settings = harness.settings.model_copy(update={"rollouts": config})
    await prompts(harness, SUMS[0])
    harness.api._transport.app.services.put(settings)  # type: ignore[attr-defined]
    await plan(harness, verifier={"type": "custom", "name": "mine"})
    row = await rolling(harness, settings)
    assert row.state == "done" and await harness.all(Reward) == [] and await harness.all(Sample) == []
    [reason] = {one.reason for one in await rollouts(harness)}
    words = {"raises": "boom", "hangs": "more than 0.1 s", "says 2": "'2'", "exits": "bye"}
    assert words.get(does, "nothing to say") in reason


async def test_the_page_of_metrics_counts_them_apart(harness: Harness, scripted: ScriptedEngine) -> None:
    await prompts(harness, SUMS[0])
    await plan(harness)
    await rolled(harness, harness.settings)
    page = (await harness.api.get("/metrics")).text
    assert 'attune_rollouts_total{origin="prompt_set",policy="shop",project="default",state="done"} 2.0' in page
    assert "attune_turns_total{" not in page
