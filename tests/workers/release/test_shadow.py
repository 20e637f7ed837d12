"""Proven → in rehearsal → out, or rejected: beside what serves, behind people's chats, heard by nobody."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from alignment.config.rewards import RewardsConfig
from alignment.release.canary import CanaryConfig
from alignment.release.shadow import RehearsalConfig
from app.core.database import now
from app.core.settings import Settings
from app.models import (
    Audit,
    Engine,
    Judgement,
    Mode,
    Origin,
    Policy,
    Project,
    Reward,
    Rollout,
    RolloutState,
    Sample,
    Turn,
    TurnState,
    Version,
    VersionState,
    new_id,
)
from app.projects.service import create_project
from tests.support.deployment import Ring
from tests.support.judgements import Oracle, graded, judged, listening
from tests.support.rollout_rows import HI, chat, rolled, rollouts
from tests.support.scripted_engine import ScriptedEngine
from tests.workers.release.test_publish import trained
from tests.workers.rollouts.test_group_sampling import put
from workers.feedback.curate import curate
from workers.reconcile import retire, sweep
from workers.release import engine_inventory
from workers.release.evaluate import evaluate
from workers.release.publish import publish
from workers.release.shadow import watch
from workers.rollouts import queue, sampler, shadow_replies
from workers.rollouts.sample import roll_out
from workers.training.assemble import assemble

# Ten pairs of one mind are evidence enough. A scripted reply takes no time that could be compared.
CONFIG = RehearsalConfig(share=1.0, alpha=0.2, margin=0.3, min_turns=4, min_rated=4, max_latency_ratio=1e9)
RULE = {"sources": [{"type": "explicit"}, {"type": "rule", "name": "ended", "function": "ended"}]}


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"rehearsal": CONFIG, "rewards": RewardsConfig.model_validate(RULE)})


def taste(candidate: float, serving: float) -> Oracle:
    """Whoever is asked likes one version better than the other, by its name."""
    return Oracle(lambda body: {"reward": candidate if body["turn"]["model"] == "shop@v1" else serving})


async def begun(ring: Ring, settings: Settings | None = None) -> Version:
    """A version that has just begun to rehearse."""
    settings = settings or ring.settings
    version = await trained(ring)
    await evaluate(ring.db, settings, "test")
    await publish(ring.db, settings)
    row: Version = await ring.get(Version, version.id)
    assert row.state == VersionState.REHEARSING and row.rehearsing_since is not None
    return row


async def talk(ring: Ring, people: int) -> None:
    for number in range(people):
        await chat(ring, user=f"user-{number}", max_tokens=16)


async def run(ring: Ring, settings: Settings) -> None:
    """What has been said so far is answered beside, and judged."""
    await rolled(ring, settings)
    await judged(ring, settings)


async def rehearsed(ring: Ring) -> list[Turn]:
    return [turn for turn in await ring.all(Turn) if turn.origin == Origin.REHEARSAL]


async def pair(ring: Ring, version: Version, ours: float | None, theirs: float | None, **values: Any) -> Turn:
    """A reply of what serves and one of the candidate beside it, as they are once both were judged by the rule."""
    took = {"finished_at": now() + 1.0}
    spoken = await ring.turn(**took, curated=True)
    done = {"origin": Origin.REHEARSAL, "beside_id": spoken.id, "curated": True, **took, **values}
    turn = await ring.turn(version, **done)
    async with ring.db.write() as session:
        told = {"policy_id": turn.policy_id, "origin": turn.origin, "choice_index": 0, "due_at": 0.0, "expires_at": 0.0}
        session.add(Rollout(id=turn.id, state=RolloutState.DONE, tokens=2, seconds=1.0, **told))
        for id, value in ((turn.id, ours), (spoken.id, theirs)):
            if value is not None:
                session.add(Reward(id=new_id("rew"), turn_id=id, source="ended", origin="ended", value=value))
    return turn


async def shown(ring: Ring) -> Any:
    return (await ring.api.get("/v1/policies/shop/deployment")).json()["rehearsal"]


async def over(ring: Ring) -> None:
    """Its patience has run out."""
    async with ring.db.write() as session:
        await session.execute(update(Version).values(rehearsing_since=now() - 10 * CONFIG.patience_seconds))


async def test_it_answers_beside_what_serves_and_nobody_hears_it(ring: Ring, scripted: ScriptedEngine) -> None:
    base = await ring.serving()
    with taste(1.0, -1.0).at() as url:
        settings = listening(ring, {"type": "http", "url": url})
        version = await begun(ring, settings)
        answer = await ring.api.post(
            "/v1/chat/completions", json={"model": "shop", "messages": HI, "user": "ada", "temperature": 0}
        )
        assert answer.headers["x-policy-version"] == "shop@v0", "its pointer has not moved"
        named = await ring.api.post("/v1/chat/completions", json={"model": "shop@v1", "messages": HI})
        assert named.status_code == 404, "nor is it there for whoever names it"
        spoken = await ring.get(Turn, answer.json()["id"])
        asked = len(scripted.heard)
        await curate(ring.db, settings)
        [beside] = await rehearsed(ring)
        assert (beside.state, len(scripted.heard)) == (TurnState.OPEN, asked), "written down before it is asked"
        await run(ring, settings)
    [beside] = await rehearsed(ring)
    assert (beside.beside_id, beside.version_id, beside.state) == (spoken.id, version.id, TurnState.DONE)
    assert (beside.prompt_ids, beside.end_user, beside.key_id) == (spoken.prompt_ids, "ada", spoken.key_id)
    body = scripted.heard[asked]
    assert (body["lora_path"], body["input_ids"], body["priority"]) == ("shop-v1", spoken.prompt_ids, -1)
    assert body["temperature"] == 0, "asked as the chat was, though nobody could learn from it"
    values = {row.turn_id: row.value for row in await ring.all(Reward)}
    assert values == {spoken.id: -1.0, beside.id: 1.0}
    stored = (await ring.api.get("/v1/chat/completions")).json()["data"]
    assert [one["id"] for one in stored] == [spoken.id]
    assert (await ring.api.get(f"/v1/chat/completions/{beside.id}")).status_code == 404
    assert (await ring.thumb(beside.id)).status_code == 404
    assert (await ring.serving()).id == base.id
    assert "data" in (rows := (await ring.api.get("/v1/policies/shop/versions")).json())
    assert {row["name"]: row["turns"] for row in rows["data"]} == {"shop@v0": 1, "shop@v1": 0}
    told = await shown(ring)
    assert (told["version"], told["verdict"], told["better"], told["worse"]) == ("shop@v1", "wait", 0, 0)


async def test_a_worse_one_is_rejected_and_learning_goes_on_from_what_serves(
    ring: Ring, scripted: ScriptedEngine
) -> None:
    base = await ring.serving()
    with taste(0.1, 0.9).at() as url:
        settings = listening(ring, {"type": "http", "url": url})
        version = await begun(ring, settings)
        await talk(ring, 10)
        assert "is in rehearsal" in (await ring.api.get("/v1/policies/shop/training")).json()["missing"]
        await run(ring, settings)
        await sweep(ring.db, settings)
    row: Version = await ring.get(Version, version.id)
    said = "rehearsal: less approval: better in 0 of 10 pairs, worse in 10, sure to 0.9"
    assert (row.state, row.reason) == (VersionState.REJECTED, said)
    assert row.metrics["rehearsal/worse"] == 10 and row.metrics["rehearsal/approval"] == 1.0
    policy = await ring.policy()
    assert policy.head_version_id == base.id == (await ring.serving()).id
    assert (policy.mode, policy.alarms) == (Mode.SYNCHRONOUS, 1), "like a gate's no"
    audit = {(one.action, one.actor): one.reason for one in await ring.all(Audit)}
    assert audit["version rejected", "watch"] == said and audit["rehearsal", "publish"] == "proven"
    answer = await ring.api.post("/v1/chat/completions", json={"model": "shop", "messages": HI})
    assert answer.headers["x-policy-version"] == "shop@v0"
    await retire(ring.db, settings)
    assert "shop-v1" not in scripted.adapters


@pytest.mark.parametrize(
    ("canary", "state"), [(None, VersionState.LIVE), (CanaryConfig(share=0.2), VersionState.CANARY)]
)
async def test_a_better_one_goes_on_to_whom_new_versions_go(
    ring: Ring, scripted: ScriptedEngine, canary: CanaryConfig | None, state: VersionState
) -> None:
    with taste(0.9, 0.1).at() as url:
        settings = listening(ring, {"type": "http", "url": url}, canary=canary)
        version = await begun(ring, settings)
        await talk(ring, 10)
        await run(ring, settings)
        await sweep(ring.db, settings)
        assert (await ring.get(Version, version.id)).state == VersionState.REHEARSED
        await publish(ring.db, settings)
    row: Version = await ring.get(Version, version.id)
    assert (row.state, row.metrics["rehearsal/better"]) == (state, 10)
    reasons = {one.action: one.reason for one in await ring.all(Audit)}
    assert "better in 10 of 10 pairs" in (reasons["rehearsed"] or "")
    assert reasons["deploy" if canary is None else "canary"] == "rehearsed"


async def test_it_is_never_learned_from(ring: Ring, scripted: ScriptedEngine) -> None:
    with taste(0.9, 0.1).at() as url:
        settings = listening(ring, {"type": "http", "url": url}, batch_size=2)
        await begun(ring, settings)
        await talk(ring, 3)
        await run(ring, settings)
        await run(ring, settings)
    chats = {turn.id for turn in await ring.all(Turn) if turn.origin == Origin.CHAT}
    assert {sample.turn_id for sample in await ring.all(Sample)} == chats and len(await rehearsed(ring)) == 3
    assert await assemble(ring.db, settings) == 0, "and meanwhile nothing is learned at all"


async def test_there_is_none_unless_it_is_asked_for(ring: Ring, scripted: ScriptedEngine) -> None:
    settings = ring.settings.model_copy(update={"rehearsal": None})
    assert Settings().rehearsal is None
    version = await trained(ring)
    await evaluate(ring.db, settings, "test")
    await publish(ring.db, settings)
    assert (await ring.get(Version, version.id)).state == VersionState.LIVE
    await chat(ring)
    await rolled(ring, settings)
    assert await rehearsed(ring) == [] and await shown(ring) is None


async def test_people_go_first_and_a_rehearsal_without_room_has_not_been_passed(
    ring: Ring, scripted: ScriptedEngine
) -> None:
    version = await begun(ring)
    await talk(ring, 5)
    await curate(ring.db, ring.settings)
    busy = await ring.turn(state=TurnState.OPEN, finished_at=None)
    asked = len(scripted.heard)
    await roll_out(ring.db, ring.settings, "me")
    assert len(scripted.heard) == asked, "somebody is talking to the engine"
    async with ring.db.write() as session:
        await session.execute(update(Rollout).values(expires_at=0.0))
    await roll_out(ring.db, ring.settings, "me")
    assert {row.reason for row in await rollouts(ring)} == {queue.TOO_LATE}
    await over(ring)
    await watch(ring.db, ring.settings)
    row: Version = await ring.get(Version, version.id)
    assert row.state == VersionState.REJECTED and "0 of 4 replies, 0 of 4 rated" in (row.reason or "")
    assert len(scripted.heard) == asked and (await ring.get(Turn, busy.id)).state == TurnState.OPEN


async def test_a_person_has_one_vote_however_much_he_talks(ring: Ring, scripted: ScriptedEngine) -> None:
    version = await begun(ring)
    for _ in range(12):
        spoken = await pair(ring, version, -1.0, 1.0)
        async with ring.db.write() as session:
            one = Turn.id.in_((spoken.id, spoken.beside_id))
            await session.execute(update(Turn).where(one).values(end_user="ada"))
    assert await watch(ring.db, ring.settings) == 0
    told = await shown(ring)
    assert (told["worse"], told["candidate"]["turns"], told["candidate"]["rated"]) == (1, 1, 1)


async def test_only_what_a_source_has_said_of_both_counts_and_only_when_all_have_spoken(
    ring: Ring, scripted: ScriptedEngine
) -> None:
    version = await begun(ring)
    await pair(ring, version, 1.0, None)
    await pair(ring, version, None, 1.0)
    waits = await pair(ring, version, 1.0, -1.0)
    async with ring.db.write() as session:
        told = {"policy_id": waits.policy_id, "source": "ended", "due_at": 0.0}
        session.add(Judgement(id=new_id("jdg"), turn_id=waits.id, **told))
    assert (await shown(ring))["candidate"]["rated"] == 0
    async with ring.db.write() as session:
        await session.execute(update(Judgement).values(state="done"))
    await pair(ring, version, 0.5, 0.5)
    told = await shown(ring)
    assert (told["better"], told["alike"], told["worse"]) == (1, 1, 0)
    assert (told["candidate"]["good"], told["stable"]["good"]) == (2, 1)


async def test_replies_that_fail_or_grow_are_held_against_it(ring: Ring, scripted: ScriptedEngine) -> None:
    version = await begun(ring)
    for _ in range(10):
        await pair(ring, version, 1.0, -1.0, num_output_tokens=5)
    await watch(ring.db, ring.settings)
    row: Version = await ring.get(Version, version.id)
    assert row.reason == "rehearsal: replies have 2.50 times the length of the serving version's, not 0.5 to 2 times"
    async with ring.db.write() as session:
        again = await session.get_one(Version, version.id)
        again.state = VersionState.REHEARSING
        (await session.get_one(Policy, version.policy_id)).head_version_id = version.id
        failed = update(Turn).where(Turn.origin == Origin.REHEARSAL).values(state=TurnState.FAILED)
        await session.execute(failed.values(num_output_tokens=None))
    await watch(ring.db, ring.settings)
    row = await ring.get(Version, version.id)
    assert "more replies failed: 10 of 10 against 0 of 10" in (row.reason or "")


async def test_a_candidate_that_the_engine_cannot_answer_with_fails(ring: Ring, scripted: ScriptedEngine) -> None:
    await begun(ring)
    await talk(ring, 1)
    await curate(ring.db, ring.settings)
    scripted.refuse = 400
    await roll_out(ring.db, ring.settings, "me")
    assert [row.state for row in await rollouts(ring)] == [RolloutState.FAILED]
    assert (await shown(ring))["candidate"]["failed"] == 1


@pytest.mark.parametrize("why", ["request", "project", "before", "after"])
async def test_without_consent_no_prompt_is_used(ring: Ring, scripted: ScriptedEngine, why: str) -> None:
    await begun(ring)
    no = {"metadata": {"attune_train": "false"}}
    spoken = await chat(ring, user="ada", **(no if why == "request" else {}))
    asked = len(scripted.heard)
    if why == "after":
        await run(ring, ring.settings)
        assert (await shown(ring))["candidate"]["turns"] == 1
    await curate(ring.db, ring.settings)
    if why == "project":
        async with ring.db.write() as session:
            await session.execute(update(Project).values(train=False))
    if why in ("before", "after"):
        assert (await ring.api.post(f"/v1/chat/completions/{spoken.id}", json=no)).status_code == 200
    await roll_out(ring.db, ring.settings, "me")
    assert len(scripted.heard) == asked + (why == "after")
    assert (await shown(ring))["candidate"]["turns"] == 0
    assert await rehearsed(ring) == [] or why != "request"


async def test_it_is_shown_to_whom_it_answered_and_erased_with_them(ring: Ring, scripted: ScriptedEngine) -> None:
    await begun(ring)
    first = await chat(ring, user="ada")
    follow = await chat(ring)
    async with ring.db.write() as session:  # hers too, though it does not name her
        (await session.get_one(Turn, follow.id)).parent_id = first.id
    await chat(ring, user="bob")
    await run(ring, ring.settings)
    assert (await shown(ring))["candidate"]["turns"] == 3
    assert (await ring.api.get("/v1/subjects/ada")).json()["turns"] == 4
    export = (await ring.api.get("/v1/subjects/ada/export")).text
    assert export.count('"origin":"rehearsal"') == 2
    assert (await ring.api.delete("/v1/subjects/ada")).status_code == 200
    left = [turn for turn in await ring.all(Turn) if turn.deleted_at is None]
    assert {turn.end_user for turn in left} == {"bob"} and len(left) == 2
    assert all(turn.reply is None and turn.messages == [] for turn in await rehearsed(ring) if turn.deleted_at)
    assert (await shown(ring))["candidate"]["turns"] == 1


async def test_one_that_is_being_asked_when_its_chat_is_deleted_is_not_put_on_record(
    ring: Ring, scripted: ScriptedEngine
) -> None:
    await begun(ring)
    spoken = await chat(ring)
    await curate(ring.db, ring.settings)
    [claim] = await queue.take(ring.db, ring.settings, "me")
    assert (await ring.api.delete(f"/v1/chat/completions/{spoken.id}")).status_code == 200
    await put(ring, ring.settings, claim)
    [turn] = await rehearsed(ring)
    assert (turn.output_ids, turn.messages, turn.state) == (None, [], TurnState.ABORTED)


async def test_another_projects_chats_are_not_answered(ring: Ring, scripted: ScriptedEngine) -> None:
    version = await begun(ring)
    async with ring.db.write() as session:
        _, key = await create_project(session, "bakery", "shop", ring.settings.model)
    headers = {"authorization": f"Bearer {key}"}
    body = {"model": "shop", "messages": HI}
    assert (await ring.api.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
    await rolled(ring, ring.settings)
    assert await rehearsed(ring) == []
    theirs = await ring.api.get("/v1/policies/shop/deployment", headers=headers)
    assert theirs.json()["rehearsal"] is None
    for verb in ("promote", "end"):
        told = await ring.api.post(f"/v1/policies/shop/rehearsal/{verb}", json={}, headers=headers)
        assert told.status_code == 409, "of their own policy by that name"
    assert (await ring.get(Version, version.id)).state == VersionState.REHEARSING


async def test_what_is_rolled_back_meanwhile_is_not_the_candidates_fault(ring: Ring, scripted: ScriptedEngine) -> None:
    base, version = await ring.serving(), await begun(ring)
    await talk(ring, 1)
    await curate(ring.db, ring.settings)
    async with ring.db.write() as session:
        (await session.get_one(Policy, version.policy_id)).head_version_id = base.id
    assert await watch(ring.db, ring.settings) == 1
    row: Version = await ring.get(Version, version.id)
    assert (row.state, (await ring.policy()).alarms) == (VersionState.REJECTED, 0)
    asked = len(scripted.heard)
    await roll_out(ring.db, ring.settings, "me")
    assert len(scripted.heard) == asked
    assert {one.reason for one in await rollouts(ring)} == {sampler.REHEARSED}


async def test_it_stays_loaded_and_goes_out_without_another_rehearsal_when_an_engine_lost_it(
    ring: Ring, scripted: ScriptedEngine
) -> None:
    version = await begun(ring)
    async with ring.db.read() as session:
        assert version.id in {one.id for one in await engine_inventory.wanted(session, 0)}
    await retire(ring.db, ring.settings)
    assert "shop-v1" in scripted.adapters
    assert (await ring.api.post("/v1/policies/shop/rehearsal/promote", json={})).status_code == 200
    scripted.adapters.clear()
    async with ring.db.write() as session:
        (await session.get_one(Engine, "engine-0")).loaded = []
    await publish(ring.db, ring.settings)
    assert (await ring.get(Version, version.id)).state == VersionState.TRAINED, "nobody holds it: it is proven anew"
    await evaluate(ring.db, ring.settings, "test")
    live: Version = await ring.get(Version, version.id)
    assert live.state == VersionState.LIVE and "trained_to_served" not in live.timings


async def test_what_rehearsed_and_was_then_damaged_holds_learning_up_no_longer(
    ring: Ring, scripted: ScriptedEngine
) -> None:
    version = await begun(ring)
    assert (await ring.api.post("/v1/policies/shop/rehearsal/promote", json={})).status_code == 200
    scripted.adapters.clear()
    async with ring.db.write() as session:
        (await session.get_one(Engine, "engine-0")).loaded = []
    shutil.rmtree(version.adapter_path or "")
    await publish(ring.db, ring.settings)
    await evaluate(ring.db, ring.settings, "test")
    lost: Version = await ring.get(Version, version.id)
    assert lost.state == VersionState.REJECTED and "DamagedAdapter" in (lost.reason or "")
    assert (await ring.policy()).head_version_id == (await ring.serving()).id


async def test_the_hours_budget_holds(ring: Ring, scripted: ScriptedEngine) -> None:
    config = CONFIG.model_copy(update={"tokens_per_hour": 20})
    settings = ring.settings.model_copy(update={"rehearsal": config})
    await begun(ring, settings)
    await talk(ring, 5)
    asked = await rolled(ring, settings)
    assert 0 < sum(row.tokens for row in asked) <= 20 and 0 < len(asked) < 5, "no more is written down than may fit"
    assert queue.OUT_OF_BUDGET in {row.reason for row in asked}, "nor asked, if it could come to be too long"
    await talk(ring, 2)
    assert sum(row.tokens for row in await rolled(ring, settings)) <= 20


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_it_answers_a_share_and_the_same_one_again(ring: Ring, scripted: ScriptedEngine, tmp_path: Path) -> None:
    share = CONFIG.model_copy(update={"share": 0.5})
    settings = ring.settings.model_copy(update={"rehearsal": share})
    await begun(ring, settings)
    await talk(ring, 40)
    await curate(ring.db, settings)
    first = {turn.beside_id for turn in await rehearsed(ring)}
    assert 5 < len(first) < 35
    async with ring.db.write() as session:
        await session.execute(update(Turn).where(Turn.origin == Origin.CHAT).values(curated=False))
    await curate(ring.db, settings)
    assert {turn.beside_id for turn in await rehearsed(ring)} == first


async def test_a_judge_that_compares_is_shown_both_replies(ring: Ring, scripted: ScriptedEngine) -> None:
    with Oracle(lambda body: graded(4)).at() as url:
        settings = listening(ring, {"type": "judge", "url": url, "model": "wise", "compare": True})
        await begun(ring, settings)
        await talk(ring, 2)
        await run(ring, settings)
    ours = {turn.id for turn in await rehearsed(ring)}
    values = {row.turn_id: row.value for row in await ring.all(Reward) if row.turn_id in ours}
    assert values == dict.fromkeys(ours, 0.0) and len(ours) == 2, "the script says the same: a tie, unasked"
    async with ring.db.write() as session:  # the API has other rewards than these
        own = settings.rewards.model_dump(mode="json")
        (await session.get_one(Policy, (await ring.policy()).id)).rewards = own
    assert (await shown(ring))["alike"] == 2


async def test_one_that_nobody_could_judge_is_rejected_with_the_reason(ring: Ring, scripted: ScriptedEngine) -> None:
    settings = ring.settings.model_copy(update={"rewards": RewardsConfig()})
    version = await begun(ring, settings)
    await watch(ring.db, settings)
    row: Version = await ring.get(Version, version.id)
    assert row.state == VersionState.REJECTED and "it cannot rehearse: no source" in (row.reason or "")
    policy = await ring.policy()
    assert (policy.mode, policy.alarms) == (Mode.ASYNCHRONOUS, 0), "nothing was shown about it"
    assert policy.head_version_id == (await ring.serving()).id
    with pytest.raises(ValueError, match="no version could rehearse: no source"):
        Settings(rehearsal={"share": 0.2})
    own = {"sources": [{"type": "explicit"}]}
    assert (await ring.api.put("/v1/policies/shop/rewards", json=own)).status_code == 200
    refused = await ring.api.put("/v1/policies/shop/delivery", json={"rehearsal": {}})
    assert refused.status_code == 400 and "No version could rehearse" in refused.json()["error"]["message"]


async def test_a_policy_of_its_own_way_takes_no_more_tokens_than_the_deployments(
    ring: Ring, scripted: ScriptedEngine
) -> None:
    own = {"share": 0.5, "tokens_per_hour": 10**9}
    told = (await ring.api.put("/v1/policies/shop/delivery", json={"rehearsal": own})).json()
    assert told["own_rehearsal"] and told["rehearsals"]["share"] == 0.5
    assert told["rehearsals"]["tokens_per_hour"] == CONFIG.tokens_per_hour
    told = (await ring.api.put("/v1/policies/shop/delivery", json={})).json()
    assert not told["own_rehearsal"] and told["rehearsals"]["share"] == 1.0


@pytest.mark.parametrize("verb", ["promote", "end"])
async def test_a_person_ends_it_one_way_or_the_other(ring: Ring, scripted: ScriptedEngine, verb: str) -> None:
    version = await begun(ring)
    told = await ring.api.post(f"/v1/policies/shop/rehearsal/{verb}", json={"reason": "enough"})
    assert told.status_code == 200 and told.json()["rehearsal"] is None
    await publish(ring.db, ring.settings)
    row: Version = await ring.get(Version, version.id)
    if verb == "promote":
        assert row.state == VersionState.LIVE
    else:
        assert (row.state, row.reason) == (VersionState.REJECTED, "enough")
        assert (await ring.policy()).head_version_id == (await ring.serving()).id
        assert (await ring.policy()).alarms == 0
    again = await ring.api.post(f"/v1/policies/shop/rehearsal/{verb}", json={})
    assert again.status_code == 409 and "is in rehearsal" in again.json()["error"]["message"]


def test_a_rehearsal_is_a_completion_of_its_own(tmp_path: Path) -> None:
    turn = Turn(id="chatcmpl-a", completion_id="chatcmpl-a", sampling={"seed": 5})
    made = shadow_replies.beside(turn, Version(id="ver-1"))
    assert made["completion_id"] == made["id"] != turn.id and made["beside_id"] == turn.id
    assert (made["version_id"], made["choice_index"], made["sampling"]) == ("ver-1", 0, {"seed": 5})
