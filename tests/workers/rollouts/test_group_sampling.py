"""Shadow group samples: cast of chats that may be learned from, asked when there is room, a group with their chat."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import update

from alignment.config.rollouts import RolloutsConfig
from alignment.signals.judge_prompts import SYSTEM
from app.inference.keys import engine_keys
from app.inference.pool import EnginePool
from app.models import (
    ApiKey,
    Batch,
    Engine,
    Judgement,
    LearningMode,
    Policy,
    Project,
    Reward,
    Rollout,
    RolloutState,
    Sample,
    SampleState,
    Turn,
    TurnState,
    VersionState,
)
from app.training import unlearning
from tests.support.deployment import Harness
from tests.support.judgements import Oracle, judged, listening
from tests.support.rollout_rows import cast, chat, due, group_samples, rolled, turns, with_group_sampling
from tests.support.scripted_engine import Reply, ScriptedEngine
from workers.feedback.curate import curate
from workers.judging.enqueue import ask
from workers.judging.judge import judge
from workers.reconcile import reconcile, retire
from workers.rollouts import queue, sampler
from workers.rollouts.sample import roll_out
from workers.training import batches
from workers.training.assemble import assemble


def by_place(body: dict[str, Any]) -> dict[str, float]:
    """A service that tells replies to one prompt apart, however alike they are."""
    return {"reward": int(body["turn"]["id"][-4:], 16) / 0xFFFF}


async def test_a_chat_and_its_group_samples_become_one_group_of_a_batch(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    with Oracle(by_place).at() as url:
        settings = with_group_sampling(harness, url)
        spoken = await chat(harness, user="user-7", temperature=0.7, metadata={"plan": "gold"})
        await harness.thumb(spoken.id)
        group_samples = await cast(harness, settings)
        assert [turn.state for turn in group_samples] == [TurnState.OPEN] * 3 and scripted.heard[1:] == []
        [sample] = await harness.all(Sample)
        assert sample.ready_at > spoken.finished_at + 100, "it waits for its group samples"
        assert await assemble(harness.db, settings) == 0
        done = await rolled(harness, settings)
        assert [row.state for row in done] == [RolloutState.DONE] * 3
        assert all(row.tokens == len(spoken.output_ids) and row.duration_seconds > 0 for row in done)
        [sample] = await harness.all(Sample)
        assert sample.ready_at > spoken.finished_at + 50, "it waits for what is said of them"
        assert {row.state for row in await judged(harness, settings)} == {"done"}
    for turn in await group_samples(harness):
        assert turn.prompt_ids == spoken.prompt_ids and len(turn.logprobs) == len(turn.output_ids) > 0
        assert (turn.state, turn.exclusion_reason, turn.version_id) == (TurnState.DONE, None, spoken.version_id)
        assert (turn.completion_id, turn.end_user, turn.key_id) == (spoken.id, "user-7", spoken.key_id)
        assert (turn.parent_id, turn.prefix_hash, turn.request_sha256) == (None, None, None)
    asked = scripted.heard[1:]
    assert {body["temperature"] for body in asked} == {0.7} and {body["priority"] for body in asked} == {-1}
    assert all(body["input_ids"] == spoken.prompt_ids for body in asked)
    assert "priority" not in scripted.heard[0]
    samples = await harness.all(Sample)
    assert {sample.group_id for sample in samples} == {spoken.id} and len(samples) == 4
    assert len({sample.ready_at for sample in samples}) == 1, "they are ripe together"
    assert {sample.rater for sample in samples} == {samples[0].rater}, "and take one person's place"
    eight = settings.model_copy(update={"batch_size": 4})
    assert await assemble(harness.db, eight) == 1
    claimed = await batches.claim(harness.db, "me", eight)
    assert claimed is not None and {one.group for one in claimed.batch.samples} == {spoken.id}
    assert len({one.prompt_ids for one in claimed.batch.samples}) == 1 and len(claimed.batch.samples) == 4


async def test_a_judge_that_compares_waits_for_the_group_samples(harness: Harness, scripted: ScriptedEngine) -> None:
    settings = listening(
        harness,
        {"type": "judge", "url": "http://127.0.0.1:9", "model": "wise", "compare": True},
        rollouts=RolloutsConfig.model_validate({"group_sampling": {"extra_replies": 2}}),
    )
    await chat(harness)
    await curate(harness.db, settings)
    assert await judge(harness.db, settings, "me") == 0
    [question] = await harness.all(Judgement)
    assert (question.state, question.attempt, question.details) == ("open", 0, {}), "nobody was asked"
    await rolled(harness, settings)
    await curate(harness.db, settings)
    await judge(harness.db, settings, "me")
    questions = await harness.all(Judgement)
    assert [row.value for row in questions] == [0.0] * 3, "the script says the same three times: a tie, unasked"
    assert len({sample.group_id for sample in await harness.all(Sample)}) == 1


async def test_choices_of_the_user_count_as_group_samples(harness: Harness, scripted: ScriptedEngine) -> None:
    settings = with_group_sampling(harness, "http://127.0.0.1:9")
    await chat(harness, n=3, seed=5)
    [group_sample] = await cast(harness, settings)
    assert (group_sample.choice_index, group_sample.sampling["seed"]) == (3, 8)
    await chat(harness, n=4)
    assert len(await cast(harness, settings)) == 1


@pytest.mark.parametrize(
    "why", ["consent", "key", "greedy", "old", "off", "no judge", "credit flows back", "halted", "question", "deleted"]
)
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_what_may_not_be_learned_from_has_no_group_samples(
    harness: Harness, scripted: ScriptedEngine, why: str
) -> None:
    settings = with_group_sampling(harness, "http://127.0.0.1:9")
    if why == "key":
        async with harness.db.write() as session:
            await session.execute(update(ApiKey).values(train=False))
    fields: dict[str, Any] = {
        "consent": {"metadata": {"attune_train": "false"}},
        "greedy": {"temperature": 0},
        "question": {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "x"}]},
    }
    spoken = await chat(harness, **fields.get(why, {}))
    if why == "old":
        async with harness.db.write() as session:
            await session.execute(update(Turn).values(finished_at=Turn.finished_at - 1000))
    elif why == "off":
        settings = with_group_sampling(harness, "http://127.0.0.1:9", extra_replies=0)
    elif why == "no judge":
        settings = settings.model_copy(update={"rewards": harness.settings.rewards})
    elif why == "credit flows back":
        settings = settings.model_copy(update={"rewards": settings.rewards.model_copy(update={"discount": 0.5})})
    elif why == "halted":
        async with harness.db.write() as session:
            await session.execute(update(Policy).values(mode=LearningMode.HALTED))
    elif why == "deleted":
        await harness.api.delete(f"/v1/chat/completions/{spoken.id}")
    assert await cast(harness, settings) == []


async def test_a_share_is_drawn_by_the_turn_and_its_judges_answer_for_the_whole_group(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    for number in range(40):  # under ids of which we know that some are drawn
        id = f"chatcmpl-{number:032x}"
        await harness.turn(id=id, completion_id=id, sampling={"max_tokens": 8, "temperature": 1.0})
    source = {"type": "http", "url": "http://127.0.0.1:9", "share": 0.5}
    config = RolloutsConfig.model_validate({"group_sampling": {"extra_replies": 2, "share": 0.5}})
    settings = listening(harness, source, rollouts=config)
    group_samples = await cast(harness, settings)
    chosen = {turn.completion_id for turn in group_samples}
    assert 2 <= len(chosen) <= 20 and len(group_samples) == 2 * len(chosen)
    assert {row.turn_id for row in await harness.all(Judgement)} >= chosen, "none that nobody will judge"


async def test_users_see_nothing_of_it(harness: Harness, scripted: ScriptedEngine) -> None:
    with Oracle(by_place).at() as url:
        settings = with_group_sampling(harness, url)
        talk = {"x-conversation-id": "c-1"}
        body = {"model": "shop", "messages": [{"role": "user", "content": "hi"}]}
        first = (await harness.api.post("/v1/chat/completions", json=body, headers=talk)).json()
        await rolled(harness, settings)
        await judged(harness, settings)
    group_sample = (await group_samples(harness))[0]
    assert len((await harness.api.get(f"/v1/chat/completions/{first['id']}")).json()["choices"]) == 1
    assert [one["id"] for one in (await harness.api.get("/v1/chat/completions")).json()["data"]] == [first["id"]]
    assert (await harness.api.get(f"/v1/chat/completions/{group_sample.id}")).status_code == 404
    for about in ({"completion_id": group_sample.id}, {"completion_id": first["id"], "choice_index": 1}):
        refused = await harness.api.post("/v1/feedback", json={**about, "kind": "binary", "value": "up"})
        assert refused.status_code == 404, refused.text
    said = {"target": {"conversation_id": "c-1"}, "kind": "score", "value": -1}
    assert (await harness.api.post("/v1/feedback", json=said)).status_code == 201
    await curate(harness.db, settings)
    assert [row.turn_id for row in await harness.all(Reward) if row.origin == "explicit"] == [first["id"]]
    second = await harness.api.post(
        "/v1/chat/completions",
        json={**body, "messages": [{"role": "user", "content": "something else"}]},
        headers=talk,
    )
    assert (await harness.get(Turn, second.json()["id"])).parent_id == first["id"], "not a group sample, which is newer"
    [version] = (await harness.api.get("/v1/policies/shop/versions")).json()["data"]
    assert (version["turns"], version["rated"]) == (2, 2)
    status = (await harness.api.get("/v1/status")).json()
    assert status["turns"] == {"done": 2} and status["rollouts"] == {"done": 3}
    page = await harness.api.get("/v1/exports/turns")
    assert page.headers["x-rows"] == "2"


async def test_a_deletion_takes_the_group_samples_along(harness: Harness, scripted: ScriptedEngine) -> None:
    with Oracle(by_place).at() as url:
        settings = with_group_sampling(harness, url)
        kept, gone = await chat(harness), await chat(harness)
        await rolled(harness, settings)
        await judged(harness, settings)
        assert (await harness.api.delete(f"/v1/chat/completions/{gone.id}")).status_code == 200
    for turn in await turns(harness):
        deleted = turn.completion_id == gone.id
        assert (turn.deleted_at is not None, turn.messages == [], turn.output_ids is None) == (deleted,) * 3
    states = {row.turn_id: row.state for row in await harness.all(Sample)}
    assert sorted(states.values()) == [SampleState.DROPPED] * 4 + [SampleState.OPEN] * 4
    assert states[kept.id] == SampleState.OPEN


@pytest.mark.parametrize("database_url", [pytest.param("postgres", marks=pytest.mark.postgres)], indirect=True)
async def test_a_deletion_waits_for_group_samples_that_are_being_cast(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    settings = with_group_sampling(harness, "http://127.0.0.1:9", extra_replies=1)
    turn = await chat(harness)
    async with harness.db.write() as session:
        assert await ask(session, 10, settings) == 1
        deletion = asyncio.create_task(harness.api.delete(f"/v1/chat/completions/{turn.id}"))
        await asyncio.sleep(0.3)
        assert not deletion.done()
    assert (await deletion).status_code == 200
    both = await turns(harness)
    assert len(both) == 2 and all(one.messages == [] and one.deleted_at is not None for one in both)


@pytest.mark.parametrize("database_url", [pytest.param("postgres", marks=pytest.mark.postgres)], indirect=True)
async def test_chats_do_not_wait_for_learning(harness: Harness, scripted: ScriptedEngine) -> None:
    """Whoever learns locks the policy, to which every turn refers, and turns, to which feedback does."""
    turn = await chat(harness)
    async with harness.db.write() as session:
        assert await ask(session, 10, harness.settings) == 1
        await unlearning.lock(session, turn.project_id, [])
        async with asyncio.timeout(30):
            await chat(harness)
            said = {"completion_id": turn.id, "kind": "binary", "value": True}
            assert (await harness.api.post("/v1/feedback", json=said)).status_code == 201


async def test_a_persons_group_samples_are_shown_to_them_and_erased_with_them(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    settings = with_group_sampling(harness, "http://127.0.0.1:9")
    first = await chat(harness, user="user-7")
    follow = [*first.messages, first.reply, {"role": "user", "content": "and on Sundays?"}]
    await harness.api.post("/v1/chat/completions", json={"model": "shop", "messages": follow, "user": "user-7"})
    await chat(harness, user="user-8")
    await rolled(harness, settings)
    assert (await harness.api.get("/v1/subjects/user-7")).json()["turns"] == 8
    export = (await harness.api.get("/v1/subjects/user-7/export")).text
    assert export.count('"origin":"group_sample"') == 6
    assert (await harness.api.delete("/v1/subjects/user-7")).status_code == 200
    left = [turn for turn in await turns(harness) if turn.deleted_at is None]
    assert {turn.end_user for turn in left} == {"user-8"} and len(left) == 4
    assert all(turn.conversation_id is None for turn in await turns(harness) if turn.deleted_at is not None)


async def test_a_change_of_mind_about_consent_takes_the_group_samples_along(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    with Oracle(by_place).at() as url:
        settings = with_group_sampling(harness, url, in_flight=1)
        spoken = await chat(harness)
        await cast(harness, settings)
        [claim] = await queue.take(harness.db, settings, "me")
        no = {"metadata": {"attune_train": "false"}}
        assert (await harness.api.post(f"/v1/chat/completions/{spoken.id}", json=no)).status_code == 200
        assert {row.state for row in await harness.all(Rollout)} == {RolloutState.SKIPPED}
        await put(harness, settings, claim)
        await judged(harness, settings)
    assert len(scripted.heard) == 1 or {turn.exclusion_reason for turn in await group_samples(harness)} == {
        "no consent to train"
    }
    assert await harness.all(Sample) == [] and {turn.output_ids for turn in await group_samples(harness)} == {None}


async def put(harness: Harness, settings: Any, claim: queue.Claim) -> int:
    pool = EnginePool(engine_keys(settings))
    try:
        return await sampler.Asking(harness.db, settings, pool, claim).put()
    finally:
        await pool.close()


@pytest.mark.parametrize("change", ["project", "frozen", "turned off"])
async def test_what_changes_before_it_is_asked_is_heeded(
    harness: Harness, scripted: ScriptedEngine, change: str
) -> None:
    settings = with_group_sampling(harness, "http://127.0.0.1:9")
    spoken = await chat(harness)
    await harness.thumb(spoken.id)
    await cast(harness, settings)
    async with harness.db.write() as session:
        if change == "project":
            await session.execute(update(Project).values(train=False))
        elif change == "frozen":
            await session.execute(update(Sample).values(state=SampleState.TRAINED))
    if change == "turned off":
        settings = with_group_sampling(harness, "http://127.0.0.1:9", extra_replies=0)
    await roll_out(harness.db, settings, "me")
    assert {row.state for row in await harness.all(Rollout)} == {RolloutState.SKIPPED} and len(scripted.heard) == 1


async def test_other_prompt_ids_are_a_flaw(harness: Harness, scripted: ScriptedEngine) -> None:
    with Oracle(by_place).at() as url:
        settings = with_group_sampling(harness, url, extra_replies=1)
        await chat(harness)
        await cast(harness, settings)
        scripted.wrong_prompt = [9, 9]
        await rolled(harness, settings)
        [group_sample] = await group_samples(harness)
        assert (group_sample.state, group_sample.exclusion_reason) == (TurnState.DONE, sampler.OTHER_PROMPT)
        await judged(harness, settings)
    assert {row.turn_id: row.state for row in await harness.all(Sample)}[group_sample.id] == SampleState.DROPPED


async def test_a_version_that_no_engine_holds_any_more_is_not_asked(harness: Harness, scripted: ScriptedEngine) -> None:
    settings = with_group_sampling(harness, "http://127.0.0.1:9", extra_replies=2)
    version = await harness.version(VersionState.LIVE)
    await harness.turn(version, sampling={"max_tokens": 8, "temperature": 1.0})
    await cast(harness, settings)
    await retire(harness.db, settings)
    assert {row.reason for row in await rolled(harness, settings)} == {queue.VERSION_GONE}
    async with harness.db.write() as session:
        (await session.get_one(Engine, "engine-0")).loaded = [version.adapter_name]
    await harness.turn(version, sampling={"max_tokens": 8, "temperature": 1.0})
    states = [row.reason for row in await rolled(harness, settings)]
    assert states == [queue.VERSION_GONE] * 4, "the ledger said so, but the engine knows better"
    assert {turn.state for turn in await group_samples(harness)} == {TurnState.ABORTED}


async def test_no_engine_is_waited_for_and_no_attempt_is_lost(harness: Harness, scripted: ScriptedEngine) -> None:
    settings = with_group_sampling(harness, "http://127.0.0.1:9", extra_replies=1)
    await chat(harness)
    async with harness.db.write() as session:
        (await session.get_one(Engine, "engine-0")).state = "down"
    [row] = await rolled(harness, settings)
    assert (row.state, row.attempt) == (RolloutState.OPEN, 0)


async def test_people_come_first(harness: Harness, scripted: ScriptedEngine) -> None:
    settings = with_group_sampling(harness, "http://127.0.0.1:9", extra_replies=2)
    await chat(harness)
    scripted.held = lambda reply: True
    talking = asyncio.create_task(chat(harness))
    while not [turn for turn in await turns(harness) if turn.state == TurnState.OPEN]:
        await asyncio.sleep(0.01)
    await cast(harness, settings)
    assert await queue.take(harness.db, settings, "me") == [], "somebody is being answered"
    assert (
        len(await queue.take(harness.db, with_group_sampling(harness, "http://127.0.0.1:9", most_chats=1), "me")) == 2
    )
    scripted.held = lambda reply: False
    await talking


async def test_no_more_than_so_many_at_a_time(harness: Harness, scripted: ScriptedEngine) -> None:
    settings = with_group_sampling(harness, "http://127.0.0.1:9", extra_replies=5, in_flight=2)
    await chat(harness)
    most = 0

    def held(reply: Reply) -> bool:
        """Until there are two: the fifth has nobody to wait for."""
        nonlocal most
        most = max(most, len(scripted.running))
        return most < 2

    scripted.pace, scripted.held = 0.02, held
    await curate(harness.db, settings)
    assert await roll_out(harness.db, settings, "me") == 5 and most == 2


async def test_the_budget_of_an_hour_is_never_exceeded(harness: Harness, scripted: ScriptedEngine) -> None:
    length = 9  # tokens of what the script says, its end included
    settings = with_group_sampling(
        harness, "http://127.0.0.1:9", extra_replies=2, group_sampling={"tokens_per_hour": 4 * length}
    )
    for _ in range(4):
        await chat(harness, max_tokens=length)
    rows = await rolled(harness, settings)
    assert [row.state for row in rows] == [RolloutState.DONE] * 4 and sum(row.tokens for row in rows) <= 4 * length
    await chat(harness, max_tokens=length)
    assert len(await rolled(harness, settings)) == 4, "nothing more is even written down"
    async with harness.db.write() as session:
        await session.execute(update(Rollout).values(settled_at=Rollout.settled_at - 3601))
    await chat(harness, max_tokens=length)
    assert len(await rolled(harness, settings)) == 6


async def test_a_dear_group_samples_is_skipped_when_it_might_cost_more_than_is_left(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    settings = with_group_sampling(
        harness, "http://127.0.0.1:9", extra_replies=1, group_sampling={"tokens_per_hour": 100}
    )
    await chat(harness, max_tokens=101)
    [row] = await rolled(harness, settings)
    assert (row.state, row.reason, row.tokens) == (RolloutState.SKIPPED, queue.OUT_OF_BUDGET, 0)


async def test_an_engine_that_hangs_is_asked_three_times_and_then_given_up(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    settings = with_group_sampling(harness, "http://127.0.0.1:9", extra_replies=1, timeout_seconds=1.0)
    spoken = await chat(harness)
    await harness.thumb(spoken.id)
    scripted.held = lambda reply: True
    for attempt in (1, 2):
        [row] = await rolled(harness, settings)
        assert (row.state, row.attempt, row.tokens) == (RolloutState.OPEN, attempt, 0)
        assert row.due_at > row.heartbeat_at + 4 and row.reason == "the engine took more than 1 s"
        await due(harness)
    [row] = await rolled(harness, settings)
    assert (row.state, row.attempt) == (RolloutState.FAILED, 3)
    rids = [body["rid"] for body in scripted.heard[1:]]
    assert len(set(rids)) == 3 and {len(rid) for rid in rids} == {len(spoken.id)} and scripted.aborted >= set(rids)
    [sample] = await harness.all(Sample)
    assert sample.ready_at < spoken.finished_at + 90, "its chat need not wait for it"


@pytest.mark.parametrize(("switch", "value"), [("refuse", 500), ("die_after", 2), ("hang", True)])
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_an_engine_in_trouble_is_asked_again(
    harness: Harness, scripted: ScriptedEngine, switch: str, value: Any
) -> None:
    settings = with_group_sampling(harness, "http://127.0.0.1:9", extra_replies=1)
    hasty = with_group_sampling(harness, "http://127.0.0.1:9", extra_replies=1, timeout_seconds=0.5)
    await chat(harness)
    setattr(scripted, switch, value)
    [row] = await rolled(harness, hasty)
    assert (row.state, row.attempt) == (RolloutState.OPEN, 1) and row.reason
    setattr(scripted, switch, type(scripted)().__getattribute__(switch))
    await due(harness)
    [row] = await rolled(harness, settings)
    assert (row.state, row.attempt) == (RolloutState.DONE, 2)


async def test_what_an_engine_refuses_is_not_asked_again(harness: Harness, scripted: ScriptedEngine) -> None:
    settings = with_group_sampling(harness, "http://127.0.0.1:9", extra_replies=1)
    await chat(harness)
    scripted.refuse = 400
    [row] = await rolled(harness, settings)
    assert (row.state, row.attempt, row.reason) == (RolloutState.FAILED, 1, "the script says no")


async def test_a_worker_that_dies_in_mid_reply_is_followed_by_another_and_there_is_one_turn(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    settings = with_group_sampling(harness, "http://127.0.0.1:9", extra_replies=1)
    await chat(harness)
    await cast(harness, settings)
    [claim] = await queue.take(harness.db, settings, "the dead")
    first = claim.id[:-2] + "01"
    scripted.held = lambda reply: reply.body["rid"] == first
    late = asyncio.create_task(put(harness, settings, claim))
    while first not in scripted.running:
        await asyncio.sleep(0.01)
    assert await queue.take(harness.db, settings, "me") == [], "its lease runs"
    await due(harness)  # nothing was heard of it for too long
    [row] = await rolled(harness, settings)
    assert (row.state, row.attempt, row.fence) == (RolloutState.DONE, 2, 2)
    assert await late == 0, "what the first one heard comes too late"
    [group_sample] = await group_samples(harness)
    assert len(await turns(harness)) == 2 and len(group_sample.logprobs) == len(group_sample.output_ids)
    assert first in scripted.aborted, "the engine does not go on for nobody"


async def test_who_never_lives_to_hear_the_reply_is_given_up(harness: Harness, scripted: ScriptedEngine) -> None:
    settings = with_group_sampling(harness, "http://127.0.0.1:9", extra_replies=1)
    await chat(harness)
    await cast(harness, settings)
    for _ in range(3):
        assert len(await queue.take(harness.db, settings, "the dead")) == 1
        await due(harness)
    [row] = await rolled(harness, settings)
    assert row.state == RolloutState.FAILED and row.reason == sampler.DIED.format(3)
    assert len(scripted.heard) == 1


async def test_group_samples_that_find_no_room_in_time_are_not_waited_for(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    settings = with_group_sampling(
        harness, "http://127.0.0.1:9", extra_replies=1, group_sampling={"window_seconds": 50}
    )
    spoken = await chat(harness)
    await harness.thumb(spoken.id)
    await cast(harness, settings)
    async with harness.db.write() as session:
        await session.execute(update(Rollout).values(expires_at=0.0))
    [row] = await rolled(harness, settings)
    assert (row.state, row.reason) == (RolloutState.SKIPPED, queue.TOO_LATE) and len(scripted.heard) == 1
    assert (await group_samples(harness))[0].state == TurnState.ABORTED


async def test_the_sweep_leaves_them_alone_and_rings_for_them(harness: Harness, scripted: ScriptedEngine) -> None:
    settings = with_group_sampling(harness, "http://127.0.0.1:9", extra_replies=1)
    await chat(harness)
    await cast(harness, settings)
    async with harness.db.write() as session:
        await session.execute(update(Turn).values(created_at=0.0))
    rung: list[str] = []
    harness.db._enqueue = rung.extend  # type: ignore[method-assign]
    await reconcile(harness.db, settings)
    assert [turn.state for turn in await group_samples(harness)] == [TurnState.OPEN] and "rollout" in rung


async def test_a_part_of_a_group_is_never_frozen_alone(harness: Harness, scripted: ScriptedEngine) -> None:
    """The chat is judged first, and its batch is full without its group samples: it waits all the same."""
    with Oracle(by_place).at() as url:
        settings = with_group_sampling(harness, url, extra_replies=2).model_copy(
            update={"batch_size": 2, "max_wait_seconds": 0.0}
        )
        await chat(harness)
        await judged(harness, settings)
        assert await assemble(harness.db, settings) == 0
        await rolled(harness, settings)
        assert await assemble(harness.db, settings) == 0
        await judged(harness, settings)
        assert await assemble(harness.db, settings.model_copy(update={"batch_size": 3})) == 1
    [batch] = await harness.all(Batch)
    assert batch.num_samples == 3
