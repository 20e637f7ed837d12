"""Group samples: more replies to the prompt of a chat, in one group with the chat's reply."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import update

from alignment.config.rollouts import RolloutsConfig
from alignment.signals.judge_prompts import SYSTEM
from app.models import (
    ApiKey,
    Batch,
    Judgement,
    LearningMode,
    Policy,
    Reward,
    RolloutState,
    Sample,
    SampleState,
    Turn,
    TurnState,
)
from app.training import unlearning
from tests.support.deployment import Harness
from tests.support.judgements import ScriptedEndpoint, run_judging, settings_with_sources
from tests.support.rollout_rows import (
    chat,
    plan_group_samples,
    read_group_samples,
    read_turns,
    reward_by_id,
    run_rollouts,
    with_group_sampling,
)
from tests.support.scripted_engine import ScriptedEngine
from workers.curate import curate, process_finished_turns
from workers.judging.judge import judge
from workers.training import batch_claims
from workers.training.assemble import assemble


async def test_a_chat_and_its_group_samples_become_one_group_of_a_batch(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    with ScriptedEndpoint(reward_by_id).serve() as url:
        settings = with_group_sampling(harness, url)
        chat_turn = await chat(harness, user="user-7", temperature=0.7, metadata={"plan": "gold"})
        await harness.vote(chat_turn.id)
        assert chat_turn.finished_at is not None and chat_turn.output_ids is not None
        group_samples = await plan_group_samples(harness, settings)
        assert [turn.state for turn in group_samples] == [TurnState.OPEN] * 3 and scripted.requests[1:] == []
        [sample] = await harness.all(Sample)
        assert sample.ready_at > chat_turn.finished_at + 100, "the sample waits for its group samples"
        assert await assemble(harness.db, settings) == 0
        rollouts = await run_rollouts(harness, settings)
        assert [row.state for row in rollouts] == [RolloutState.DONE] * 3
        assert all(row.tokens == len(chat_turn.output_ids) and (row.duration_seconds or 0) > 0 for row in rollouts)
        [sample] = await harness.all(Sample)
        assert sample.ready_at > chat_turn.finished_at + 50, "the sample waits for the rewards of its group"
        assert {row.state for row in await run_judging(harness, settings)} == {"done"}
    for turn in await read_group_samples(harness):
        assert await harness.prompt_ids(turn.id) == chat_turn.own_prompt_ids
        assert len(turn.logprobs or ()) == len(turn.output_ids or ()) > 0
        assert (turn.state, turn.exclusion_reason, turn.version_id) == (TurnState.DONE, None, chat_turn.version_id)
        assert (turn.completion_id, turn.end_user, turn.key_id) == (chat_turn.id, "user-7", chat_turn.key_id)
        assert (turn.parent_id, turn.prefix_hash, turn.request_sha256) == (None, None, None)
    requests = scripted.requests[1:]
    assert {body["temperature"] for body in requests} == {0.7} and {body["priority"] for body in requests} == {-1}
    assert all(body["input_ids"] == chat_turn.own_prompt_ids for body in requests)
    assert "priority" not in scripted.requests[0]
    samples = await harness.all(Sample)
    assert {sample.group_id for sample in samples} == {chat_turn.id} and len(samples) == 4
    assert len({sample.ready_at for sample in samples}) == 1, "they are ready at the same time"
    assert {sample.rater for sample in samples} == {samples[0].rater}, "they count for one rater"
    batch_settings = settings.replace({"trainer.batch_size": 4, "trainer.max_batch_size": 4})
    assert await assemble(harness.db, batch_settings) == 1
    claimed = await batch_claims.claim(harness.db, "me", batch_settings)
    assert claimed is not None and {sample.group for sample in claimed.batch.samples} == {chat_turn.id}
    assert len({sample.prompt_ids for sample in claimed.batch.samples}) == 1 and len(claimed.batch.samples) == 4


async def test_a_judge_that_compares_waits_for_the_group_samples(harness: Harness, scripted: ScriptedEngine) -> None:
    settings = settings_with_sources(
        harness,
        {"type": "judge", "url": "http://127.0.0.1:9", "model": "judge-model", "compare": True},
        rollouts=RolloutsConfig.model_validate({"group_sampling": {"extra_replies": 2}}),
    )
    await chat(harness)
    await curate(harness.db, settings)
    assert await judge(harness.db, settings, "me") == 0
    [judgement] = await harness.all(Judgement)
    assert (judgement.state, judgement.attempt, judgement.details) == ("open", 0, {}), "no request was sent"
    await run_rollouts(harness, settings)
    await curate(harness.db, settings)
    await judge(harness.db, settings, "me")
    judgements = await harness.all(Judgement)
    assert [row.value for row in judgements] == [0.0] * 3, "three equal replies are a tie without a request"
    assert len({sample.group_id for sample in await harness.all(Sample)}) == 1


async def test_choices_of_the_request_count_as_group_samples(harness: Harness, scripted: ScriptedEngine) -> None:
    settings = with_group_sampling(harness, "http://127.0.0.1:9")
    await chat(harness, n=3, seed=5)
    [group_sample] = await plan_group_samples(harness, settings)
    assert (group_sample.choice_index, group_sample.sampling["seed"]) == (3, 8)
    await chat(harness, n=4)
    assert len(await plan_group_samples(harness, settings)) == 1


@pytest.mark.parametrize(
    "reason", ["consent", "key", "greedy", "old", "off", "no judge", "discount", "halted", "judge prompt", "deleted"]
)
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_turns_that_cannot_be_trained_on_have_no_group_samples(
    harness: Harness, scripted: ScriptedEngine, reason: str
) -> None:
    settings = with_group_sampling(harness, "http://127.0.0.1:9")
    if reason == "key":
        async with harness.db.write() as session:
            await session.execute(update(ApiKey).values(train=False))
    fields: dict[str, Any] = {
        "consent": {"metadata": {"attune_train": "false"}},
        "greedy": {"temperature": 0},
        "judge prompt": {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "x"}]},
    }
    chat_turn = await chat(harness, **fields.get(reason, {}))
    if reason == "old":
        async with harness.db.write() as session:
            await session.execute(update(Turn).values(finished_at=Turn.finished_at - 1000))
    elif reason == "off":
        settings = with_group_sampling(harness, "http://127.0.0.1:9", extra_replies=0)
    elif reason == "no judge":
        settings = settings.replace({"rewards": harness.settings.rewards})
    elif reason == "discount":
        settings = settings.replace({"rewards": settings.rewards.model_copy(update={"discount": 0.5})})
    elif reason == "halted":
        async with harness.db.write() as session:
            await session.execute(update(Policy).values(mode=LearningMode.HALTED))
    elif reason == "deleted":
        await harness.api.delete(f"/v1/chat/completions/{chat_turn.id}")
    assert await plan_group_samples(harness, settings) == []


async def test_a_share_of_the_turns_has_group_samples_and_all_of_a_group_are_judged(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    for number in range(40):  # fixed ids, some of which are in the share
        id = f"chatcmpl-{number:032x}"
        await harness.turn(id=id, completion_id=id, sampling={"max_tokens": 8, "temperature": 1.0})
    source = {"type": "http", "url": "http://127.0.0.1:9", "share": 0.5}
    config = RolloutsConfig.model_validate({"group_sampling": {"extra_replies": 2, "share": 0.5}})
    settings = settings_with_sources(harness, source, rollouts=config)
    group_samples = await plan_group_samples(harness, settings)
    chosen = {turn.completion_id for turn in group_samples}
    assert 2 <= len(chosen) <= 20 and len(group_samples) == 2 * len(chosen)
    assert {row.turn_id for row in await harness.all(Judgement)} >= chosen, "no group sample without a judge"


async def test_group_samples_are_hidden_from_users(harness: Harness, scripted: ScriptedEngine) -> None:
    with ScriptedEndpoint(reward_by_id).serve() as url:
        settings = with_group_sampling(harness, url)
        headers = {"x-conversation-id": "c-1"}
        body = {"model": "shop", "messages": [{"role": "user", "content": "hi"}]}
        first = (await harness.api.post("/v1/chat/completions", json=body, headers=headers)).json()
        await run_rollouts(harness, settings)
        await run_judging(harness, settings)
    group_sample = (await read_group_samples(harness))[0]
    assert len((await harness.api.get(f"/v1/chat/completions/{first['id']}")).json()["choices"]) == 1
    assert [one["id"] for one in (await harness.api.get("/v1/chat/completions")).json()["data"]] == [first["id"]]
    assert (await harness.api.get(f"/v1/chat/completions/{group_sample.id}")).status_code == 404
    for target in ({"completion_id": group_sample.id}, {"completion_id": first["id"], "choice_index": 1}):
        refused = await harness.api.post("/v1/feedback", json={**target, "kind": "binary", "value": "up"})
        assert refused.status_code == 404, refused.text
    feedback = {"target": {"conversation_id": "c-1"}, "kind": "score", "value": -1}
    assert (await harness.api.post("/v1/feedback", json=feedback)).status_code == 201
    await curate(harness.db, settings)
    assert [row.turn_id for row in await harness.all(Reward) if row.reward_source == "explicit"] == [first["id"]]
    second = await harness.api.post(
        "/v1/chat/completions",
        json={**body, "messages": [{"role": "user", "content": "something else"}]},
        headers=headers,
    )
    assert (await harness.get(Turn, second.json()["id"])).parent_id == first["id"], (
        "not the group sample, which is newer"
    )
    [version] = (await harness.api.get("/v1/policies/shop/versions")).json()["data"]
    assert (version["turns"], version["rated"]) == (2, 1), "people's votes; the judge has none"
    status = (await harness.api.get("/v1/status")).json()
    assert status["turns"] == {"done": 2} and status["rollouts"] == {"done": 3}
    page = await harness.api.get("/v1/exports/turns")
    assert page.headers["x-rows"] == "2"


async def test_a_deletion_deletes_the_group_samples_too(harness: Harness, scripted: ScriptedEngine) -> None:
    with ScriptedEndpoint(reward_by_id).serve() as url:
        settings = with_group_sampling(harness, url)
        other, deleted = await chat(harness), await chat(harness)
        await run_rollouts(harness, settings)
        await run_judging(harness, settings)
        assert (await harness.api.delete(f"/v1/chat/completions/{deleted.id}")).status_code == 200
    for turn in await read_turns(harness):
        is_deleted = turn.completion_id == deleted.id
        assert (turn.deleted_at is not None, turn.reply is None, turn.output_ids is None) == (is_deleted,) * 3
        if is_deleted:
            assert (turn.own_messages, turn.own_prompt_ids, turn.history_id) == ([], None, None)
    states = {row.turn_id: row.state for row in await harness.all(Sample)}
    assert sorted(states.values()) == [SampleState.DROPPED] * 4 + [SampleState.OPEN] * 4
    assert states[other.id] == SampleState.OPEN


@pytest.mark.parametrize("database_url", [pytest.param("postgres", marks=pytest.mark.postgres)], indirect=True)
async def test_a_deletion_waits_for_group_samples_that_are_being_created(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    settings = with_group_sampling(harness, "http://127.0.0.1:9", extra_replies=1)
    turn = await chat(harness)
    async with harness.db.write() as session:
        assert await process_finished_turns(session, 10, settings) == 1
        deletion = asyncio.create_task(harness.api.delete(f"/v1/chat/completions/{turn.id}"))
        await asyncio.sleep(0.3)
        assert not deletion.done()
    assert (await deletion).status_code == 200
    all_turns = await read_turns(harness)
    assert len(all_turns) == 2 and all(one.own_messages == [] and one.deleted_at is not None for one in all_turns)


@pytest.mark.parametrize("database_url", [pytest.param("postgres", marks=pytest.mark.postgres)], indirect=True)
async def test_chats_do_not_wait_for_training(harness: Harness, scripted: ScriptedEngine) -> None:
    """Training locks the policy, to which every turn refers, and turns, to which feedback refers."""
    turn = await chat(harness)
    async with harness.db.write() as session:
        assert await process_finished_turns(session, 10, harness.settings) == 1
        await unlearning.lock_policies_and_turns(session, turn.project_id, [])
        async with asyncio.timeout(30):
            await chat(harness)
            feedback = {"completion_id": turn.id, "kind": "binary", "value": True}
            assert (await harness.api.post("/v1/feedback", json=feedback)).status_code == 201


async def test_the_group_samples_of_an_end_user_are_exported_and_erased(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    settings = with_group_sampling(harness, "http://127.0.0.1:9")
    first = await chat(harness, user="user-7")
    messages = [*first.own_messages, first.reply, {"role": "user", "content": "and on Sundays?"}]
    await harness.api.post("/v1/chat/completions", json={"model": "shop", "messages": messages, "user": "user-7"})
    await chat(harness, user="user-8")
    await run_rollouts(harness, settings)
    assert (await harness.api.get("/v1/subjects/user-7")).json()["turns"] == 8
    export = (await harness.api.get("/v1/subjects/user-7/export")).text
    assert export.count('"origin":"group_sample"') == 6
    assert (await harness.api.delete("/v1/subjects/user-7")).status_code == 200
    remaining = [turn for turn in await read_turns(harness) if turn.deleted_at is None]
    assert {turn.end_user for turn in remaining} == {"user-8"} and len(remaining) == 4
    assert all(turn.conversation_id is None for turn in await read_turns(harness) if turn.deleted_at is not None)


async def test_a_group_is_not_split(harness: Harness, scripted: ScriptedEngine) -> None:
    """The chat's sample is judged first and waits for its group samples."""
    with ScriptedEndpoint(reward_by_id).serve() as url:
        settings = with_group_sampling(harness, url, extra_replies=2)
        settings = settings.replace(
            {"trainer.batch_size": 2, "trainer.max_batch_size": 2, "trainer.max_wait_seconds": 0.0}
        )
        await chat(harness)
        await run_judging(harness, settings)
        assert await assemble(harness.db, settings) == 0
        await run_rollouts(harness, settings)
        assert await assemble(harness.db, settings) == 0
        await run_judging(harness, settings)
        assert await assemble(harness.db, settings.replace({"trainer.batch_size": 3, "trainer.max_batch_size": 3})) == 1
    [batch] = await harness.all(Batch)
    assert batch.num_samples == 3
