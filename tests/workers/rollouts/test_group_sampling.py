"""Shadow siblings: cast of chats that may be learned from, asked when there is room, a group with their chat."""

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
    Mode,
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
from tests.support.deployment import Ring
from tests.support.judgements import Oracle, judged, listening
from tests.support.rollout_rows import cast, chat, due, rolled, shadowing, shadows, turns
from tests.support.scripted_engine import Reply, ScriptedEngine
from workers.feedback.curate import curate
from workers.judging.enqueue import ask
from workers.judging.judge import judge
from workers.reconcile import retire, sweep
from workers.rollouts import queue, sampler
from workers.rollouts.sample import roll_out
from workers.training import batches
from workers.training.assemble import assemble


def by_place(body: dict[str, Any]) -> dict[str, float]:
    """A service that tells replies to one prompt apart, however alike they are."""
    return {"reward": int(body["turn"]["id"][-4:], 16) / 0xFFFF}


async def test_a_chat_and_its_siblings_become_one_group_of_a_batch(ring: Ring, scripted: ScriptedEngine) -> None:
    with Oracle(by_place).at() as url:
        settings = shadowing(ring, url)
        spoken = await chat(ring, user="user-7", temperature=0.7, metadata={"plan": "gold"})
        await ring.thumb(spoken.id)
        siblings = await cast(ring, settings)
        assert [turn.state for turn in siblings] == [TurnState.OPEN] * 3 and scripted.heard[1:] == []
        [sample] = await ring.all(Sample)
        assert sample.matures_at > spoken.finished_at + 100, "it waits for its siblings"
        assert await assemble(ring.db, settings) == 0
        done = await rolled(ring, settings)
        assert [row.state for row in done] == [RolloutState.DONE] * 3
        assert all(row.tokens == len(spoken.output_ids) and row.seconds > 0 for row in done)
        [sample] = await ring.all(Sample)
        assert sample.matures_at > spoken.finished_at + 50, "it waits for what is said of them"
        assert {row.state for row in await judged(ring, settings)} == {"done"}
    for turn in await shadows(ring):
        assert turn.prompt_ids == spoken.prompt_ids and len(turn.logprobs) == len(turn.output_ids) > 0
        assert (turn.state, turn.flaw, turn.version_id) == (TurnState.DONE, None, spoken.version_id)
        assert (turn.completion_id, turn.end_user, turn.key_id) == (spoken.id, "user-7", spoken.key_id)
        assert (turn.parent_id, turn.thread, turn.request_sha256) == (None, None, None)
    asked = scripted.heard[1:]
    assert {body["temperature"] for body in asked} == {0.7} and {body["priority"] for body in asked} == {-1}
    assert all(body["input_ids"] == spoken.prompt_ids for body in asked)
    assert "priority" not in scripted.heard[0]
    samples = await ring.all(Sample)
    assert {sample.group_id for sample in samples} == {spoken.id} and len(samples) == 4
    assert len({sample.matures_at for sample in samples}) == 1, "they are ripe together"
    assert {sample.rater for sample in samples} == {samples[0].rater}, "and take one person's place"
    eight = settings.model_copy(update={"batch_size": 4})
    assert await assemble(ring.db, eight) == 1
    claimed = await batches.claim(ring.db, "me", eight)
    assert claimed is not None and {one.group for one in claimed.batch.samples} == {spoken.id}
    assert len({one.prompt_ids for one in claimed.batch.samples}) == 1 and len(claimed.batch.samples) == 4


async def test_a_judge_that_compares_waits_for_the_siblings(ring: Ring, scripted: ScriptedEngine) -> None:
    settings = listening(
        ring,
        {"type": "judge", "url": "http://127.0.0.1:9", "model": "wise", "compare": True},
        rollouts=RolloutsConfig.model_validate({"shadows": {"siblings": 2}}),
    )
    await chat(ring)
    await curate(ring.db, settings)
    assert await judge(ring.db, settings, "me") == 0
    [question] = await ring.all(Judgement)
    assert (question.state, question.attempt, question.details) == ("open", 0, {}), "nobody was asked"
    await rolled(ring, settings)
    await curate(ring.db, settings)
    await judge(ring.db, settings, "me")
    questions = await ring.all(Judgement)
    assert [row.value for row in questions] == [0.0] * 3, "the script says the same three times: a tie, unasked"
    assert len({sample.group_id for sample in await ring.all(Sample)}) == 1


async def test_choices_of_the_user_count_as_siblings(ring: Ring, scripted: ScriptedEngine) -> None:
    settings = shadowing(ring, "http://127.0.0.1:9")
    await chat(ring, n=3, seed=5)
    [sibling] = await cast(ring, settings)
    assert (sibling.choice_index, sibling.sampling["seed"]) == (3, 8)
    await chat(ring, n=4)
    assert len(await cast(ring, settings)) == 1


@pytest.mark.parametrize(
    "why", ["consent", "key", "greedy", "old", "off", "no judge", "credit flows back", "halted", "question", "deleted"]
)
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_what_may_not_be_learned_from_has_no_siblings(ring: Ring, scripted: ScriptedEngine, why: str) -> None:
    settings = shadowing(ring, "http://127.0.0.1:9")
    if why == "key":
        async with ring.db.write() as session:
            await session.execute(update(ApiKey).values(train=False))
    fields: dict[str, Any] = {
        "consent": {"metadata": {"attune_train": "false"}},
        "greedy": {"temperature": 0},
        "question": {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "x"}]},
    }
    spoken = await chat(ring, **fields.get(why, {}))
    if why == "old":
        async with ring.db.write() as session:
            await session.execute(update(Turn).values(finished_at=Turn.finished_at - 1000))
    elif why == "off":
        settings = shadowing(ring, "http://127.0.0.1:9", siblings=0)
    elif why == "no judge":
        settings = settings.model_copy(update={"rewards": ring.settings.rewards})
    elif why == "credit flows back":
        settings = settings.model_copy(update={"rewards": settings.rewards.model_copy(update={"discount": 0.5})})
    elif why == "halted":
        async with ring.db.write() as session:
            await session.execute(update(Policy).values(mode=Mode.HALTED))
    elif why == "deleted":
        await ring.api.delete(f"/v1/chat/completions/{spoken.id}")
    assert await cast(ring, settings) == []


async def test_a_share_is_drawn_by_the_turn_and_its_judges_answer_for_the_whole_group(
    ring: Ring, scripted: ScriptedEngine
) -> None:
    for number in range(40):  # under ids of which we know that some are drawn
        id = f"chatcmpl-{number:032x}"
        await ring.turn(id=id, completion_id=id, sampling={"max_tokens": 8, "temperature": 1.0})
    source = {"type": "http", "url": "http://127.0.0.1:9", "share": 0.5}
    config = RolloutsConfig.model_validate({"shadows": {"siblings": 2, "share": 0.5}})
    settings = listening(ring, source, rollouts=config)
    siblings = await cast(ring, settings)
    chosen = {turn.completion_id for turn in siblings}
    assert 2 <= len(chosen) <= 20 and len(siblings) == 2 * len(chosen)
    assert {row.turn_id for row in await ring.all(Judgement)} >= chosen, "none that nobody will judge"


async def test_users_see_nothing_of_it(ring: Ring, scripted: ScriptedEngine) -> None:
    with Oracle(by_place).at() as url:
        settings = shadowing(ring, url)
        talk = {"x-conversation-id": "c-1"}
        body = {"model": "shop", "messages": [{"role": "user", "content": "hi"}]}
        first = (await ring.api.post("/v1/chat/completions", json=body, headers=talk)).json()
        await rolled(ring, settings)
        await judged(ring, settings)
    sibling = (await shadows(ring))[0]
    assert len((await ring.api.get(f"/v1/chat/completions/{first['id']}")).json()["choices"]) == 1
    assert [one["id"] for one in (await ring.api.get("/v1/chat/completions")).json()["data"]] == [first["id"]]
    assert (await ring.api.get(f"/v1/chat/completions/{sibling.id}")).status_code == 404
    for about in ({"completion_id": sibling.id}, {"completion_id": first["id"], "choice_index": 1}):
        refused = await ring.api.post("/v1/feedback", json={**about, "kind": "binary", "value": "up"})
        assert refused.status_code == 404, refused.text
    said = {"target": {"conversation_id": "c-1"}, "kind": "score", "value": -1}
    assert (await ring.api.post("/v1/feedback", json=said)).status_code == 201
    await curate(ring.db, settings)
    assert [row.turn_id for row in await ring.all(Reward) if row.origin == "explicit"] == [first["id"]]
    second = await ring.api.post(
        "/v1/chat/completions",
        json={**body, "messages": [{"role": "user", "content": "something else"}]},
        headers=talk,
    )
    assert (await ring.get(Turn, second.json()["id"])).parent_id == first["id"], "not a sibling, which is newer"
    [version] = (await ring.api.get("/v1/policies/shop/versions")).json()["data"]
    assert (version["turns"], version["rated"]) == (2, 2)
    status = (await ring.api.get("/v1/status")).json()
    assert status["turns"] == {"done": 2} and status["rollouts"] == {"done": 3}
    page = await ring.api.get("/v1/exports/turns")
    assert page.headers["x-rows"] == "2"


async def test_a_deletion_takes_the_siblings_along(ring: Ring, scripted: ScriptedEngine) -> None:
    with Oracle(by_place).at() as url:
        settings = shadowing(ring, url)
        kept, gone = await chat(ring), await chat(ring)
        await rolled(ring, settings)
        await judged(ring, settings)
        assert (await ring.api.delete(f"/v1/chat/completions/{gone.id}")).status_code == 200
    for turn in await turns(ring):
        deleted = turn.completion_id == gone.id
        assert (turn.deleted_at is not None, turn.messages == [], turn.output_ids is None) == (deleted,) * 3
    states = {row.turn_id: row.state for row in await ring.all(Sample)}
    assert sorted(states.values()) == [SampleState.DROPPED] * 4 + [SampleState.OPEN] * 4
    assert states[kept.id] == SampleState.OPEN


@pytest.mark.parametrize("database_url", [pytest.param("postgres", marks=pytest.mark.postgres)], indirect=True)
async def test_a_deletion_waits_for_siblings_that_are_being_cast(ring: Ring, scripted: ScriptedEngine) -> None:
    settings = shadowing(ring, "http://127.0.0.1:9", siblings=1)
    turn = await chat(ring)
    async with ring.db.write() as session:
        assert await ask(session, 10, settings) == 1
        deletion = asyncio.create_task(ring.api.delete(f"/v1/chat/completions/{turn.id}"))
        await asyncio.sleep(0.3)
        assert not deletion.done()
    assert (await deletion).status_code == 200
    both = await turns(ring)
    assert len(both) == 2 and all(one.messages == [] and one.deleted_at is not None for one in both)


@pytest.mark.parametrize("database_url", [pytest.param("postgres", marks=pytest.mark.postgres)], indirect=True)
async def test_chats_do_not_wait_for_learning(ring: Ring, scripted: ScriptedEngine) -> None:
    """Whoever learns locks the policy, to which every turn refers, and turns, to which feedback does."""
    turn = await chat(ring)
    async with ring.db.write() as session:
        assert await ask(session, 10, ring.settings) == 1
        await unlearning.lock(session, turn.project_id, [])
        async with asyncio.timeout(30):
            await chat(ring)
            said = {"completion_id": turn.id, "kind": "binary", "value": True}
            assert (await ring.api.post("/v1/feedback", json=said)).status_code == 201


async def test_a_persons_siblings_are_shown_to_them_and_erased_with_them(ring: Ring, scripted: ScriptedEngine) -> None:
    settings = shadowing(ring, "http://127.0.0.1:9")
    first = await chat(ring, user="user-7")
    follow = [*first.messages, first.reply, {"role": "user", "content": "and on Sundays?"}]
    await ring.api.post("/v1/chat/completions", json={"model": "shop", "messages": follow, "user": "user-7"})
    await chat(ring, user="user-8")
    await rolled(ring, settings)
    assert (await ring.api.get("/v1/subjects/user-7")).json()["turns"] == 8
    export = (await ring.api.get("/v1/subjects/user-7/export")).text
    assert export.count('"origin":"shadow"') == 6
    assert (await ring.api.delete("/v1/subjects/user-7")).status_code == 200
    left = [turn for turn in await turns(ring) if turn.deleted_at is None]
    assert {turn.end_user for turn in left} == {"user-8"} and len(left) == 4
    assert all(turn.conversation_id is None for turn in await turns(ring) if turn.deleted_at is not None)


async def test_a_change_of_mind_about_consent_takes_the_siblings_along(ring: Ring, scripted: ScriptedEngine) -> None:
    with Oracle(by_place).at() as url:
        settings = shadowing(ring, url, in_flight=1)
        spoken = await chat(ring)
        await cast(ring, settings)
        [claim] = await queue.take(ring.db, settings, "me")
        no = {"metadata": {"attune_train": "false"}}
        assert (await ring.api.post(f"/v1/chat/completions/{spoken.id}", json=no)).status_code == 200
        assert {row.state for row in await ring.all(Rollout)} == {RolloutState.SKIPPED}
        await put(ring, settings, claim)
        await judged(ring, settings)
    assert len(scripted.heard) == 1 or {turn.flaw for turn in await shadows(ring)} == {"no consent to train"}
    assert await ring.all(Sample) == [] and {turn.output_ids for turn in await shadows(ring)} == {None}


async def put(ring: Ring, settings: Any, claim: queue.Claim) -> int:
    pool = EnginePool(engine_keys(settings))
    try:
        return await sampler.Asking(ring.db, settings, pool, claim).put()
    finally:
        await pool.close()


@pytest.mark.parametrize("change", ["project", "frozen", "turned off"])
async def test_what_changes_before_it_is_asked_is_heeded(ring: Ring, scripted: ScriptedEngine, change: str) -> None:
    settings = shadowing(ring, "http://127.0.0.1:9")
    spoken = await chat(ring)
    await ring.thumb(spoken.id)
    await cast(ring, settings)
    async with ring.db.write() as session:
        if change == "project":
            await session.execute(update(Project).values(train=False))
        elif change == "frozen":
            await session.execute(update(Sample).values(state=SampleState.TRAINED))
    if change == "turned off":
        settings = shadowing(ring, "http://127.0.0.1:9", siblings=0)
    await roll_out(ring.db, settings, "me")
    assert {row.state for row in await ring.all(Rollout)} == {RolloutState.SKIPPED} and len(scripted.heard) == 1


async def test_other_prompt_ids_are_a_flaw(ring: Ring, scripted: ScriptedEngine) -> None:
    with Oracle(by_place).at() as url:
        settings = shadowing(ring, url, siblings=1)
        await chat(ring)
        await cast(ring, settings)
        scripted.wrong_prompt = [9, 9]
        await rolled(ring, settings)
        [sibling] = await shadows(ring)
        assert (sibling.state, sibling.flaw) == (TurnState.DONE, sampler.OTHER_PROMPT)
        await judged(ring, settings)
    assert {row.turn_id: row.state for row in await ring.all(Sample)}[sibling.id] == SampleState.DROPPED


async def test_a_version_that_no_engine_holds_any_more_is_not_asked(ring: Ring, scripted: ScriptedEngine) -> None:
    settings = shadowing(ring, "http://127.0.0.1:9", siblings=2)
    version = await ring.version(VersionState.LIVE)
    await ring.turn(version, sampling={"max_tokens": 8, "temperature": 1.0})
    await cast(ring, settings)
    await retire(ring.db, settings)
    assert {row.reason for row in await rolled(ring, settings)} == {queue.VERSION_GONE}
    async with ring.db.write() as session:
        (await session.get_one(Engine, "engine-0")).loaded = [version.adapter_name]
    await ring.turn(version, sampling={"max_tokens": 8, "temperature": 1.0})
    states = [row.reason for row in await rolled(ring, settings)]
    assert states == [queue.VERSION_GONE] * 4, "the ledger said so, but the engine knows better"
    assert {turn.state for turn in await shadows(ring)} == {TurnState.ABORTED}


async def test_no_engine_is_waited_for_and_no_attempt_is_lost(ring: Ring, scripted: ScriptedEngine) -> None:
    settings = shadowing(ring, "http://127.0.0.1:9", siblings=1)
    await chat(ring)
    async with ring.db.write() as session:
        (await session.get_one(Engine, "engine-0")).state = "down"
    [row] = await rolled(ring, settings)
    assert (row.state, row.attempt) == (RolloutState.OPEN, 0)


async def test_people_come_first(ring: Ring, scripted: ScriptedEngine) -> None:
    settings = shadowing(ring, "http://127.0.0.1:9", siblings=2)
    await chat(ring)
    scripted.held = lambda reply: True
    talking = asyncio.create_task(chat(ring))
    while not [turn for turn in await turns(ring) if turn.state == TurnState.OPEN]:
        await asyncio.sleep(0.01)
    await cast(ring, settings)
    assert await queue.take(ring.db, settings, "me") == [], "somebody is being answered"
    assert len(await queue.take(ring.db, shadowing(ring, "http://127.0.0.1:9", most_chats=1), "me")) == 2
    scripted.held = lambda reply: False
    await talking


async def test_no_more_than_so_many_at_a_time(ring: Ring, scripted: ScriptedEngine) -> None:
    settings = shadowing(ring, "http://127.0.0.1:9", siblings=5, in_flight=2)
    await chat(ring)
    most = 0

    def held(reply: Reply) -> bool:
        """Until there are two: the fifth has nobody to wait for."""
        nonlocal most
        most = max(most, len(scripted.running))
        return most < 2

    scripted.pace, scripted.held = 0.02, held
    await curate(ring.db, settings)
    assert await roll_out(ring.db, settings, "me") == 5 and most == 2


async def test_the_budget_of_an_hour_is_never_exceeded(ring: Ring, scripted: ScriptedEngine) -> None:
    length = 9  # tokens of what the script says, its end included
    settings = shadowing(ring, "http://127.0.0.1:9", siblings=2, shadows={"tokens_per_hour": 4 * length})
    for _ in range(4):
        await chat(ring, max_tokens=length)
    rows = await rolled(ring, settings)
    assert [row.state for row in rows] == [RolloutState.DONE] * 4 and sum(row.tokens for row in rows) <= 4 * length
    await chat(ring, max_tokens=length)
    assert len(await rolled(ring, settings)) == 4, "nothing more is even written down"
    async with ring.db.write() as session:
        await session.execute(update(Rollout).values(settled_at=Rollout.settled_at - 3601))
    await chat(ring, max_tokens=length)
    assert len(await rolled(ring, settings)) == 6


async def test_a_dear_sibling_is_skipped_when_it_might_cost_more_than_is_left(
    ring: Ring, scripted: ScriptedEngine
) -> None:
    settings = shadowing(ring, "http://127.0.0.1:9", siblings=1, shadows={"tokens_per_hour": 100})
    await chat(ring, max_tokens=101)
    [row] = await rolled(ring, settings)
    assert (row.state, row.reason, row.tokens) == (RolloutState.SKIPPED, queue.OUT_OF_BUDGET, 0)


async def test_an_engine_that_hangs_is_asked_three_times_and_then_given_up(
    ring: Ring, scripted: ScriptedEngine
) -> None:
    settings = shadowing(ring, "http://127.0.0.1:9", siblings=1, timeout_seconds=1.0)
    spoken = await chat(ring)
    await ring.thumb(spoken.id)
    scripted.held = lambda reply: True
    for attempt in (1, 2):
        [row] = await rolled(ring, settings)
        assert (row.state, row.attempt, row.tokens) == (RolloutState.OPEN, attempt, 0)
        assert row.due_at > row.heartbeat_at + 4 and row.reason == "the engine took more than 1 s"
        await due(ring)
    [row] = await rolled(ring, settings)
    assert (row.state, row.attempt) == (RolloutState.FAILED, 3)
    rids = [body["rid"] for body in scripted.heard[1:]]
    assert len(set(rids)) == 3 and {len(rid) for rid in rids} == {len(spoken.id)} and scripted.aborted >= set(rids)
    [sample] = await ring.all(Sample)
    assert sample.matures_at < spoken.finished_at + 90, "its chat need not wait for it"


@pytest.mark.parametrize(("switch", "value"), [("refuse", 500), ("die_after", 2), ("hang", True)])
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_an_engine_in_trouble_is_asked_again(
    ring: Ring, scripted: ScriptedEngine, switch: str, value: Any
) -> None:
    settings = shadowing(ring, "http://127.0.0.1:9", siblings=1)
    hasty = shadowing(ring, "http://127.0.0.1:9", siblings=1, timeout_seconds=0.5)
    await chat(ring)
    setattr(scripted, switch, value)
    [row] = await rolled(ring, hasty)
    assert (row.state, row.attempt) == (RolloutState.OPEN, 1) and row.reason
    setattr(scripted, switch, type(scripted)().__getattribute__(switch))
    await due(ring)
    [row] = await rolled(ring, settings)
    assert (row.state, row.attempt) == (RolloutState.DONE, 2)


async def test_what_an_engine_refuses_is_not_asked_again(ring: Ring, scripted: ScriptedEngine) -> None:
    settings = shadowing(ring, "http://127.0.0.1:9", siblings=1)
    await chat(ring)
    scripted.refuse = 400
    [row] = await rolled(ring, settings)
    assert (row.state, row.attempt, row.reason) == (RolloutState.FAILED, 1, "the script says no")


async def test_a_worker_that_dies_in_mid_reply_is_followed_by_another_and_there_is_one_turn(
    ring: Ring, scripted: ScriptedEngine
) -> None:
    settings = shadowing(ring, "http://127.0.0.1:9", siblings=1)
    await chat(ring)
    await cast(ring, settings)
    [claim] = await queue.take(ring.db, settings, "the dead")
    first = claim.id[:-2] + "01"
    scripted.held = lambda reply: reply.body["rid"] == first
    late = asyncio.create_task(put(ring, settings, claim))
    while first not in scripted.running:
        await asyncio.sleep(0.01)
    assert await queue.take(ring.db, settings, "me") == [], "its lease runs"
    await due(ring)  # nothing was heard of it for too long
    [row] = await rolled(ring, settings)
    assert (row.state, row.attempt, row.fence) == (RolloutState.DONE, 2, 2)
    assert await late == 0, "what the first one heard comes too late"
    [sibling] = await shadows(ring)
    assert len(await turns(ring)) == 2 and len(sibling.logprobs) == len(sibling.output_ids)
    assert first in scripted.aborted, "the engine does not go on for nobody"


async def test_who_never_lives_to_hear_the_reply_is_given_up(ring: Ring, scripted: ScriptedEngine) -> None:
    settings = shadowing(ring, "http://127.0.0.1:9", siblings=1)
    await chat(ring)
    await cast(ring, settings)
    for _ in range(3):
        assert len(await queue.take(ring.db, settings, "the dead")) == 1
        await due(ring)
    [row] = await rolled(ring, settings)
    assert row.state == RolloutState.FAILED and row.reason == sampler.DIED.format(3)
    assert len(scripted.heard) == 1


async def test_siblings_that_find_no_room_in_time_are_not_waited_for(ring: Ring, scripted: ScriptedEngine) -> None:
    settings = shadowing(ring, "http://127.0.0.1:9", siblings=1, shadows={"window_seconds": 50})
    spoken = await chat(ring)
    await ring.thumb(spoken.id)
    await cast(ring, settings)
    async with ring.db.write() as session:
        await session.execute(update(Rollout).values(expires_at=0.0))
    [row] = await rolled(ring, settings)
    assert (row.state, row.reason) == (RolloutState.SKIPPED, queue.TOO_LATE) and len(scripted.heard) == 1
    assert (await shadows(ring))[0].state == TurnState.ABORTED


async def test_the_sweep_leaves_them_alone_and_rings_for_them(ring: Ring, scripted: ScriptedEngine) -> None:
    settings = shadowing(ring, "http://127.0.0.1:9", siblings=1)
    await chat(ring)
    await cast(ring, settings)
    async with ring.db.write() as session:
        await session.execute(update(Turn).values(created_at=0.0))
    rung: list[str] = []
    ring.db._ring = rung.extend  # type: ignore[method-assign]
    await sweep(ring.db, settings)
    assert [turn.state for turn in await shadows(ring)] == [TurnState.OPEN] and "rollout" in rung


async def test_a_part_of_a_group_is_never_frozen_alone(ring: Ring, scripted: ScriptedEngine) -> None:
    """The chat is judged first, and its batch is full without its siblings: it waits all the same."""
    with Oracle(by_place).at() as url:
        settings = shadowing(ring, url, siblings=2).model_copy(update={"batch_size": 2, "max_wait_seconds": 0.0})
        await chat(ring)
        await judged(ring, settings)
        assert await assemble(ring.db, settings) == 0
        await rolled(ring, settings)
        assert await assemble(ring.db, settings) == 0
        await judged(ring, settings)
        assert await assemble(ring.db, settings.model_copy(update={"batch_size": 3})) == 1
    [batch] = await ring.all(Batch)
    assert batch.num_samples == 3
