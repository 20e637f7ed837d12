"""Shadow deployments: a version answers copies of live prompts, and passes or is rejected by its judged replies."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from alignment.config.rewards import RewardsConfig
from alignment.release.canary import CanaryConfig
from alignment.release.shadow import ShadowConfig
from app.core.database import now
from app.core.settings import Settings
from app.engines import inventory
from app.models import (
    Audit,
    Engine,
    Judgement,
    LearningMode,
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
from tests.support.deployment import Harness
from tests.support.judgements import ScriptedEndpoint, grade_response, run_judging, settings_with_sources
from tests.support.rollout_rows import HI, chat, read_rollouts, run_rollout_job, run_rollouts
from tests.support.scripted_engine import ScriptedEngine
from tests.workers.release.test_publish import create_trained_version
from workers.curate import curate
from workers.reconcile import reconcile
from workers.release.adapter_sync import unload_unused_adapters
from workers.release.evaluate import evaluate
from workers.release.publish import check_shadow_deployments, publish
from workers.rollouts import chat_rollouts, rollout_queue, sampler
from workers.rollouts.sampler import sample_rollouts
from workers.training.assemble import assemble

# Ten unanimous pairs are enough to decide. Latency is ignored, because scripted replies take no time.
CONFIG = ShadowConfig(share=1.0, alpha=0.2, margin=0.3, min_turns=4, min_rated=4, max_latency_ratio=1e9)
RULE = {"sources": [{"type": "explicit"}, {"type": "rule", "name": "ended", "function": "ended"}]}


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.replace({"release.shadow": CONFIG, "rewards": RewardsConfig.model_validate(RULE)})


def judge_preferring(candidate: float, serving: float) -> ScriptedEndpoint:
    """Return a judge that scores a reply by the name of its version."""
    return ScriptedEndpoint(lambda body: {"reward": candidate if body["turn"]["model"] == "shop@v1" else serving})


async def start_shadow(harness: Harness, settings: Settings | None = None) -> Version:
    """Publish a version in shadow."""
    settings = settings or harness.settings
    version = await create_trained_version(harness)
    await evaluate(harness.db, settings, "test")
    await publish(harness.db, settings)
    row: Version = await harness.get(Version, version.id)
    assert row.state == VersionState.SHADOW and row.shadow_since is not None
    return row


async def send_chats(harness: Harness, num_users: int) -> None:
    for number in range(num_users):
        await chat(harness, user=f"user-{number}", max_tokens=16)


async def run_shadow(harness: Harness, settings: Settings) -> None:
    """Sample the shadow replies to all chats so far, and judge the replies."""
    await run_rollouts(harness, settings)
    await run_judging(harness, settings)


async def shadow_turns(harness: Harness) -> list[Turn]:
    return [turn for turn in await harness.all(Turn) if turn.origin == Origin.SHADOW]


async def add_pair(
    harness: Harness, version: Version, candidate_reward: float | None, serving_reward: float | None, **values: Any
) -> Turn:
    """Create a reply of the serving version and one of the candidate, both scored by the rule."""
    times: dict[str, Any] = {"finished_at": now() + 1.0}
    live = await harness.turn(**times, processed=True)
    columns = {"origin": Origin.SHADOW, "shadow_of_id": live.id, "processed": True, **times, **values}
    turn = await harness.turn(version, **columns)
    async with harness.db.write() as session:
        durations = {"due_at": 0.0, "expires_at": 0.0, "duration_seconds": 1.0}
        names = {"policy_id": turn.policy_id, "origin": turn.origin, "choice_index": 0}
        session.add(Rollout(id=turn.id, state=RolloutState.DONE, tokens=2, **names, **durations))
        for id, value in ((turn.id, candidate_reward), (live.id, serving_reward)):
            if value is not None:
                session.add(Reward(id=new_id("rew"), turn_id=id, source="ended", reward_source="ended", value=value))
    return turn


async def get_shadow(harness: Harness) -> Any:
    return (await harness.api.get("/v1/policies/shop/deployment")).json()["shadow"]


async def expire_shadow(harness: Harness) -> None:
    """Move the start of the shadow deployment beyond its time limit."""
    async with harness.db.write() as session:
        await session.execute(update(Version).values(shadow_since=now() - 10 * CONFIG.patience_seconds))


async def test_shadow_version_answers_and_users_do_not_see_it(harness: Harness, scripted: ScriptedEngine) -> None:
    base = await harness.serving()
    with judge_preferring(1.0, -1.0).serve() as url:
        settings = settings_with_sources(harness, {"type": "http", "url": url})
        version = await start_shadow(harness, settings)
        answer = await harness.api.post(
            "/v1/chat/completions", json={"model": "shop", "messages": HI, "user": "ada", "temperature": 0}
        )
        assert answer.headers["x-policy-version"] == "shop@v0", "the deployment has not changed"
        named = await harness.api.post("/v1/chat/completions", json={"model": "shop@v1", "messages": HI})
        assert named.status_code == 404, "clients cannot request the shadow version"
        live = await harness.get(Turn, answer.json()["id"])
        num_requests = len(scripted.requests)
        await curate(harness.db, settings)
        [shadow] = await shadow_turns(harness)
        assert (shadow.state, len(scripted.requests)) == (TurnState.OPEN, num_requests), "the turn is stored first"
        await run_shadow(harness, settings)
    [shadow] = await shadow_turns(harness)
    assert (shadow.shadow_of_id, shadow.version_id, shadow.state) == (live.id, version.id, TurnState.DONE)
    assert await harness.prompt_ids(shadow.id) == live.own_prompt_ids
    assert (shadow.end_user, shadow.key_id) == ("ada", live.key_id)
    body = scripted.requests[num_requests]
    assert (body["lora_path"], body["input_ids"], body["priority"]) == ("shop-v1", live.own_prompt_ids, -1)
    assert body["temperature"] == 0, "the chat's sampling is used, although greedy turns cannot be trained on"
    values = {row.turn_id: row.value for row in await harness.all(Reward)}
    assert values == {live.id: -1.0, shadow.id: 1.0}
    stored = (await harness.api.get("/v1/chat/completions")).json()["data"]
    assert [one["id"] for one in stored] == [live.id]
    assert (await harness.api.get(f"/v1/chat/completions/{shadow.id}")).status_code == 404
    assert (await harness.vote(shadow.id)).status_code == 404
    assert (await harness.serving()).id == base.id
    assert "data" in (rows := (await harness.api.get("/v1/policies/shop/versions")).json())
    assert {row["name"]: row["turns"] for row in rows["data"]} == {"shop@v0": 1, "shop@v1": 0}
    shadow = await get_shadow(harness)
    assert (shadow["version"], shadow["verdict"], shadow["better"], shadow["worse"]) == ("shop@v1", "wait", 0, 0)


async def test_worse_shadow_is_rejected_and_training_continues_from_the_serving_version(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    base = await harness.serving()
    with judge_preferring(0.1, 0.9).serve() as url:
        settings = settings_with_sources(harness, {"type": "http", "url": url})
        version = await start_shadow(harness, settings)
        await send_chats(harness, 10)
        assert "is in shadow" in (await harness.api.get("/v1/policies/shop/training")).json()["waiting_for"]
        await run_shadow(harness, settings)
        await reconcile(harness.db, settings)
    row: Version = await harness.get(Version, version.id)
    reason = "shadow: less approval: better in 0 of 10 pairs, worse in 10, confidence 0.9"
    assert (row.state, row.reason) == (VersionState.REJECTED, reason)
    assert row.metrics["shadow/worse"] == 10 and row.metrics["shadow/approval"] == 1.0
    policy = await harness.policy()
    assert policy.head_version_id == base.id == (await harness.serving()).id
    assert (policy.mode, policy.kl_alarms) == (LearningMode.SYNCHRONOUS, 1), "as after the rejection by a gate"
    audit = {(one.action, one.actor): one.reason for one in await harness.all(Audit)}
    assert audit["version.rejected", "reconcile"] == reason and audit["shadow.began", "publish"] == "verified"
    answer = await harness.api.post("/v1/chat/completions", json={"model": "shop", "messages": HI})
    assert answer.headers["x-policy-version"] == "shop@v0"
    await unload_unused_adapters(harness.db, settings)
    assert "shop-v1" not in scripted.adapters


@pytest.mark.parametrize(
    ("canary", "state"), [(None, VersionState.LIVE), (CanaryConfig(share=0.2), VersionState.CANARY)]
)
async def test_better_shadow_passes_to_the_next_release_state(
    harness: Harness, scripted: ScriptedEngine, canary: CanaryConfig | None, state: VersionState
) -> None:
    with judge_preferring(0.9, 0.1).serve() as url:
        settings = settings_with_sources(harness, {"type": "http", "url": url}, canary=canary)
        version = await start_shadow(harness, settings)
        await send_chats(harness, 10)
        await run_shadow(harness, settings)
        await reconcile(harness.db, settings)
        assert (await harness.get(Version, version.id)).state == VersionState.SHADOW_PASSED
        await publish(harness.db, settings)
    row: Version = await harness.get(Version, version.id)
    assert (row.state, row.metrics["shadow/better"], row.metrics["shadow/tied"]) == (state, 10, 0)
    reasons = {one.action: one.reason for one in await harness.all(Audit)}
    assert "better in 10 of 10 pairs" in (reasons["shadow.passed"] or "")
    assert reasons["deployment.deployed" if canary is None else "canary.began"] == "shadow_passed"


async def test_shadow_turns_are_not_trained_on(harness: Harness, scripted: ScriptedEngine) -> None:
    with judge_preferring(0.9, 0.1).serve() as url:
        settings = settings_with_sources(harness, {"type": "http", "url": url}, batch_size=2)
        await start_shadow(harness, settings)
        await send_chats(harness, 3)
        await run_shadow(harness, settings)
        await run_shadow(harness, settings)
    chats = {turn.id for turn in await harness.all(Turn) if turn.origin == Origin.CHAT}
    assert {sample.turn_id for sample in await harness.all(Sample)} == chats and len(await shadow_turns(harness)) == 3
    assert await assemble(harness.db, settings) == 0, "training waits for the end of the shadow"


async def test_shadow_is_off_by_default(harness: Harness, scripted: ScriptedEngine) -> None:
    settings = harness.settings.replace({"release.shadow": None})
    assert Settings().release.shadow is None
    version = await create_trained_version(harness)
    await evaluate(harness.db, settings, "test")
    await publish(harness.db, settings)
    assert (await harness.get(Version, version.id)).state == VersionState.LIVE
    await chat(harness)
    await run_rollouts(harness, settings)
    assert await shadow_turns(harness) == [] and await get_shadow(harness) is None


async def test_chats_have_priority_and_a_shadow_without_capacity_does_not_pass(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    version = await start_shadow(harness)
    await send_chats(harness, 5)
    await curate(harness.db, harness.settings)
    open_chat = await harness.turn(state=TurnState.OPEN, finished_at=None)
    num_requests = len(scripted.requests)
    await sample_rollouts(harness.db, harness.settings, "me")
    assert len(scripted.requests) == num_requests, "a chat is open"
    async with harness.db.write() as session:
        await session.execute(update(Rollout).values(expires_at=0.0))
    await sample_rollouts(harness.db, harness.settings, "me")
    assert {row.reason for row in await read_rollouts(harness)} == {rollout_queue.EXPIRED}
    await expire_shadow(harness)
    await check_shadow_deployments(harness.db, harness.settings)
    row: Version = await harness.get(Version, version.id)
    assert row.state == VersionState.REJECTED and "0 of 4 replies, 0 of 4 rated" in (row.reason or "")
    assert len(scripted.requests) == num_requests and (await harness.get(Turn, open_chat.id)).state == TurnState.OPEN


async def test_one_user_has_one_vote(harness: Harness, scripted: ScriptedEngine) -> None:
    version = await start_shadow(harness)
    for _ in range(12):
        live = await add_pair(harness, version, -1.0, 1.0)
        async with harness.db.write() as session:
            is_in_pair = Turn.id.in_((live.id, live.shadow_of_id))
            await session.execute(update(Turn).where(is_in_pair).values(end_user="ada"))
    assert await check_shadow_deployments(harness.db, harness.settings) == 0
    shadow = await get_shadow(harness)
    assert (shadow["worse"], shadow["candidate"]["turns"], shadow["candidate"]["rated"]) == (1, 1, 1)


async def test_only_complete_pairs_scored_by_the_same_source_count(harness: Harness, scripted: ScriptedEngine) -> None:
    version = await start_shadow(harness)
    await add_pair(harness, version, 1.0, None)
    await add_pair(harness, version, None, 1.0)
    undecided = await add_pair(harness, version, 1.0, -1.0)
    async with harness.db.write() as session:
        values = {"policy_id": undecided.policy_id, "source": "ended", "due_at": 0.0}
        session.add(Judgement(id=new_id("jdg"), turn_id=undecided.id, **values))
    assert (await get_shadow(harness))["candidate"]["rated"] == 0
    async with harness.db.write() as session:
        await session.execute(update(Judgement).values(state="done"))
    await add_pair(harness, version, 0.5, 0.5)
    shadow = await get_shadow(harness)
    assert (shadow["better"], shadow["tied"], shadow["worse"]) == (1, 1, 0)
    assert (shadow["candidate"]["good"], shadow["stable"]["good"]) == (2, 1)


async def test_failed_and_longer_replies_count_against_the_version(harness: Harness, scripted: ScriptedEngine) -> None:
    version = await start_shadow(harness)
    for _ in range(10):
        await add_pair(harness, version, 1.0, -1.0, num_output_tokens=5)
    await check_shadow_deployments(harness.db, harness.settings)
    row: Version = await harness.get(Version, version.id)
    assert row.reason == "shadow: replies have 2.50 times the length of the serving version's, not 0.5 to 2 times"
    async with harness.db.write() as session:
        again = await session.get_one(Version, version.id)
        again.state = VersionState.SHADOW
        (await session.get_one(Policy, version.policy_id)).head_version_id = version.id
        failed = update(Turn).where(Turn.origin == Origin.SHADOW).values(state=TurnState.FAILED)
        await session.execute(failed.values(num_output_tokens=None))
    await check_shadow_deployments(harness.db, harness.settings)
    row = await harness.get(Version, version.id)
    assert "more replies failed: 10 of 10 against 0 of 10" in (row.reason or "")


async def test_version_that_no_engine_can_run_fails(harness: Harness, scripted: ScriptedEngine) -> None:
    await start_shadow(harness)
    await send_chats(harness, 1)
    await curate(harness.db, harness.settings)
    scripted.refuse_status = 400
    await sample_rollouts(harness.db, harness.settings, "me")
    assert [row.state for row in await read_rollouts(harness)] == [RolloutState.FAILED]
    assert (await get_shadow(harness))["candidate"]["failed"] == 1


@pytest.mark.parametrize("refusal", ["by request", "by project", "before the reply", "after the reply"])
async def test_prompts_without_consent_are_not_used(harness: Harness, scripted: ScriptedEngine, refusal: str) -> None:
    await start_shadow(harness)
    no_consent = {"metadata": {"attune_train": "false"}}
    live = await chat(harness, user="ada", **(no_consent if refusal == "by request" else {}))
    num_requests = len(scripted.requests)
    if refusal == "after the reply":
        await run_shadow(harness, harness.settings)
        assert (await get_shadow(harness))["candidate"]["turns"] == 1
    await curate(harness.db, harness.settings)
    if refusal == "by project":
        async with harness.db.write() as session:
            await session.execute(update(Project).values(train=False))
    if refusal in ("before the reply", "after the reply"):
        assert (await harness.api.post(f"/v1/chat/completions/{live.id}", json=no_consent)).status_code == 200
    await sample_rollouts(harness.db, harness.settings, "me")
    assert len(scripted.requests) == num_requests + (refusal == "after the reply")
    assert (await get_shadow(harness))["candidate"]["turns"] == 0
    assert await shadow_turns(harness) == [] or refusal != "by request"


async def test_shadow_turns_are_exported_and_erased_with_the_user(harness: Harness, scripted: ScriptedEngine) -> None:
    await start_shadow(harness)
    first = await chat(harness, user="ada")
    follow = await chat(harness)
    async with harness.db.write() as session:  # a later turn of ada's chat that does not name her
        (await session.get_one(Turn, follow.id)).parent_id = first.id
    await chat(harness, user="bob")
    await run_shadow(harness, harness.settings)
    assert (await get_shadow(harness))["candidate"]["turns"] == 3
    assert (await harness.api.get("/v1/subjects/ada")).json()["turns"] == 4
    export = (await harness.api.get("/v1/subjects/ada/export")).text
    assert export.count('"origin":"shadow"') == 2
    assert (await harness.api.delete("/v1/subjects/ada")).status_code == 200
    remaining = [turn for turn in await harness.all(Turn) if turn.deleted_at is None]
    assert {turn.end_user for turn in remaining} == {"bob"} and len(remaining) == 2
    assert all(
        turn.reply is None and turn.own_messages == [] for turn in await shadow_turns(harness) if turn.deleted_at
    )
    assert (await get_shadow(harness))["candidate"]["turns"] == 1


async def test_shadow_reply_is_not_recorded_if_its_chat_is_deleted_meanwhile(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    await start_shadow(harness)
    live = await chat(harness)
    await curate(harness.db, harness.settings)
    [(rollout, engine)] = await rollout_queue.claim_rollouts(harness.db, harness.settings, "me")
    assert (await harness.api.delete(f"/v1/chat/completions/{live.id}")).status_code == 200
    await run_rollout_job(harness, harness.settings, rollout, engine)
    [turn] = await shadow_turns(harness)
    assert (turn.output_ids, turn.own_messages, turn.state) == (None, [], TurnState.ABORTED)


async def test_chats_of_another_project_are_not_answered(harness: Harness, scripted: ScriptedEngine) -> None:
    version = await start_shadow(harness)
    async with harness.db.write() as session:
        _, key = await create_project(session, "bakery", "shop", harness.settings.model)
    headers = {"authorization": f"Bearer {key}"}
    body = {"model": "shop", "messages": HI}
    assert (await harness.api.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
    await run_rollouts(harness, harness.settings)
    assert await shadow_turns(harness) == []
    response = await harness.api.get("/v1/policies/shop/deployment", headers=headers)
    assert response.json()["shadow"] is None
    for verb in ("promote", "abort"):
        response = await harness.api.post(f"/v1/policies/shop/shadow/{verb}", json={}, headers=headers)
        assert response.status_code == 409, "the other project's policy of that name"
    assert (await harness.get(Version, version.id)).state == VersionState.SHADOW


async def test_rollback_during_shadow_raises_no_alarm(harness: Harness, scripted: ScriptedEngine) -> None:
    base, version = await harness.serving(), await start_shadow(harness)
    await send_chats(harness, 1)
    await curate(harness.db, harness.settings)
    async with harness.db.write() as session:
        (await session.get_one(Policy, version.policy_id)).head_version_id = base.id
    assert await check_shadow_deployments(harness.db, harness.settings) == 1
    row: Version = await harness.get(Version, version.id)
    assert (row.state, (await harness.policy()).kl_alarms) == (VersionState.REJECTED, 0)
    num_requests = len(scripted.requests)
    await sample_rollouts(harness.db, harness.settings, "me")
    assert len(scripted.requests) == num_requests
    assert {one.reason for one in await read_rollouts(harness)} == {sampler.SHADOW_ENDED}


async def test_version_that_passed_shadow_does_not_repeat_it_after_an_engine_lost_it(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    version = await start_shadow(harness)
    async with harness.db.read() as session:
        assert version.id in {one.id for one in await inventory.wanted_versions(session, 0)}
    await unload_unused_adapters(harness.db, harness.settings)
    assert "shop-v1" in scripted.adapters
    assert (await harness.api.post("/v1/policies/shop/shadow/promote", json={})).status_code == 200
    scripted.adapters.clear()
    async with harness.db.write() as session:
        (await session.get_one(Engine, "engine-0")).loaded = []
    await publish(harness.db, harness.settings)
    assert (await harness.get(Version, version.id)).state == VersionState.TRAINED, "it is verified again"
    await evaluate(harness.db, harness.settings, "test")
    live: Version = await harness.get(Version, version.id)
    assert live.state == VersionState.LIVE and "trained_to_served" not in live.timings


async def test_version_damaged_after_shadow_no_longer_blocks_training(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    version = await start_shadow(harness)
    assert (await harness.api.post("/v1/policies/shop/shadow/promote", json={})).status_code == 200
    scripted.adapters.clear()
    async with harness.db.write() as session:
        (await session.get_one(Engine, "engine-0")).loaded = []
    shutil.rmtree(version.adapter_path or "")
    await publish(harness.db, harness.settings)
    await evaluate(harness.db, harness.settings, "test")
    lost: Version = await harness.get(Version, version.id)
    assert lost.state == VersionState.REJECTED and "DamagedAdapter" in (lost.reason or "")
    assert (await harness.policy()).head_version_id == (await harness.serving()).id


async def test_token_budget_per_hour_is_respected(harness: Harness, scripted: ScriptedEngine) -> None:
    config = CONFIG.model_copy(update={"tokens_per_hour": 20})
    settings = harness.settings.replace({"release.shadow": config})
    await start_shadow(harness, settings)
    await send_chats(harness, 5)
    rollouts = await run_rollouts(harness, settings)
    assert 0 < sum(row.tokens for row in rollouts) <= 20 and 0 < len(rollouts) < 5, "within the budget"
    assert rollout_queue.OUT_OF_BUDGET in {row.reason for row in rollouts}, (
        "a reply that might exceed the budget is skipped"
    )
    await send_chats(harness, 2)
    assert sum(row.tokens for row in await run_rollouts(harness, settings)) <= 20


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_shadow_answers_a_stable_share_of_chats(
    harness: Harness, scripted: ScriptedEngine, tmp_path: Path
) -> None:
    config = CONFIG.model_copy(update={"share": 0.5})
    settings = harness.settings.replace({"release.shadow": config})
    await start_shadow(harness, settings)
    await send_chats(harness, 40)
    await curate(harness.db, settings)
    first = {turn.shadow_of_id for turn in await shadow_turns(harness)}
    assert 5 < len(first) < 35
    async with harness.db.write() as session:
        await session.execute(update(Turn).where(Turn.origin == Origin.CHAT).values(processed=False))
    await curate(harness.db, settings)
    assert {turn.shadow_of_id for turn in await shadow_turns(harness)} == first


async def test_comparing_judge_gets_both_replies(harness: Harness, scripted: ScriptedEngine) -> None:
    with ScriptedEndpoint(lambda body: grade_response(4)).serve() as url:
        settings = settings_with_sources(
            harness, {"type": "judge", "url": url, "model": "judge-model", "compare": True}
        )
        await start_shadow(harness, settings)
        await send_chats(harness, 2)
        await run_shadow(harness, settings)
    turn_ids = {turn.id for turn in await shadow_turns(harness)}
    values = {row.turn_id: row.value for row in await harness.all(Reward) if row.turn_id in turn_ids}
    assert values == dict.fromkeys(turn_ids, 0.0) and len(turn_ids) == 2, "equal replies are a tie and are not judged"
    async with harness.db.write() as session:  # the API process has other default sources
        rewards = settings.rewards.model_dump(mode="json")
        (await session.get_one(Policy, (await harness.policy()).id)).rewards = rewards
    assert (await get_shadow(harness))["tied"] == 2


async def test_shadow_without_judgements_is_rejected_with_the_reason(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    settings = harness.settings.model_copy(update={"rewards": RewardsConfig()})
    version = await start_shadow(harness, settings)
    await check_shadow_deployments(harness.db, settings)
    row: Version = await harness.get(Version, version.id)
    assert row.state == VersionState.REJECTED and "it cannot run in shadow: no reward source" in (row.reason or "")
    policy = await harness.policy()
    assert (policy.mode, policy.kl_alarms) == (LearningMode.ASYNCHRONOUS, 0), "the version was not compared"
    assert policy.head_version_id == (await harness.serving()).id
    with pytest.raises(ValueError, match="no version could run in shadow: no reward source"):
        Settings(release={"shadow": {"share": 0.2}})
    rewards = {"sources": [{"type": "explicit"}]}
    assert (await harness.api.put("/v1/policies/shop/rewards", json=rewards)).status_code == 200
    refused = await harness.api.put("/v1/policies/shop/delivery", json={"shadow": {}})
    assert refused.status_code == 400 and "No version could run in shadow" in refused.json()["error"]["message"]


async def test_policy_override_cannot_exceed_the_deployments_token_budget(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    override = {"share": 0.5, "tokens_per_hour": 10**9}
    delivery = (await harness.api.put("/v1/policies/shop/delivery", json={"shadow": override})).json()
    assert delivery["shadow_overridden"] and delivery["shadow_config"]["share"] == 0.5
    assert delivery["shadow_config"]["tokens_per_hour"] == CONFIG.tokens_per_hour
    delivery = (await harness.api.put("/v1/policies/shop/delivery", json={})).json()
    assert not delivery["shadow_overridden"] and delivery["shadow_config"]["share"] == 1.0


@pytest.mark.parametrize("verb", ["promote", "abort"])
async def test_operator_passes_or_rejects_a_shadow(harness: Harness, scripted: ScriptedEngine, verb: str) -> None:
    version = await start_shadow(harness)
    response = await harness.api.post(f"/v1/policies/shop/shadow/{verb}", json={"reason": "enough"})
    assert response.status_code == 200 and response.json()["shadow"] is None
    await publish(harness.db, harness.settings)
    row: Version = await harness.get(Version, version.id)
    if verb == "promote":
        assert row.state == VersionState.LIVE
    else:
        assert (row.state, row.reason) == (VersionState.REJECTED, "enough")
        assert (await harness.policy()).head_version_id == (await harness.serving()).id
        assert (await harness.policy()).kl_alarms == 0
    again = await harness.api.post(f"/v1/policies/shop/shadow/{verb}", json={})
    assert again.status_code == 409 and "is in shadow" in again.json()["error"]["message"]


def test_a_shadow_reply_has_its_own_completion_id(tmp_path: Path) -> None:
    prompt = {"own_messages": [], "num_history_messages": 0}
    turn = Turn(id="chatcmpl-a", completion_id="chatcmpl-a", sampling={"seed": 5}, **prompt)
    [shadow_turn] = chat_rollouts.plan_shadow_reply(turn, Version(id="ver-1"))
    assert shadow_turn.completion_id == shadow_turn.id != turn.id and shadow_turn.shadow_of_id == turn.id
    assert (shadow_turn.version_id, shadow_turn.choice_index, shadow_turn.sampling) == ("ver-1", 0, {"seed": 5})
