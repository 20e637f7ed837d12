"""Watched canaries are promoted or rolled back, and engines load wanted versions that they have lost."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from alignment.release.canary import CanaryConfig
from app.core.database import now
from app.core.settings import Settings
from app.engines import inventory
from app.models import (
    Audit,
    Deployment,
    Engine,
    EngineState,
    Origin,
    Pin,
    PinKind,
    Policy,
    Reward,
    RouteReason,
    Turn,
    TurnState,
    Version,
    VersionState,
    new_id,
)
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine
from tests.workers.release.test_publish import create_trained_version, export_values, flip
from workers.reconcile import reconcile
from workers.release.adapter_sync import sync_adapters
from workers.release.evaluate import evaluate
from workers.release.publish import check_canaries, publish
from workers.training.assemble import assemble

COUNT = itertools.count()
ONE_SECOND: dict[str, Any] = {"finished_at": now() + 1.0}  # the same duration for both versions
CONFIG = CanaryConfig(share=0.2, margin=0.3)


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.replace({"release.canary": CONFIG})


async def start_canary(harness: Harness) -> Version:
    """Publish a version as a canary."""
    version = await create_trained_version(harness)
    await evaluate(harness.db, harness.settings, "test")
    return version


async def add_turns(
    harness: Harness,
    version: Version,
    good: int,
    bad: int,
    *,
    raters: int | None = None,
    kind: str | None = "HUMAN",
    **values: Any,
) -> None:
    """Add replies of a version with a reward each, by different raters or by `raters` of them.

    With `kind=None` the rewards come from a reward source of the policy.
    """
    for at in range(good + bad):
        values = {"route_reason": RouteReason.CANARY if version.number else RouteReason.STABLE, **ONE_SECOND, **values}
        turn = await harness.turn(version, **values)
        rater = None if kind is None else f"{kind}/user-{next(COUNT) if raters is None else at % raters}"
        row = Reward(id=new_id("rw"), turn_id=turn.id, source=f"app/{rater}", rater=rater, value=1 if at < good else -1)
        async with harness.db.write() as session:
            session.add(row)


async def deployment(harness: Harness) -> Deployment:
    row: Deployment = await harness.get(Deployment, (await harness.policy()).id)
    return row


async def test_new_version_starts_as_a_canary_and_training_waits(harness: Harness, scripted: ScriptedEngine) -> None:
    base = await harness.serving()
    version = await start_canary(harness)
    assert (await harness.serving()).id == base.id
    canary: Version = await harness.get(Version, version.id)
    assert canary.state == VersionState.CANARY and "trained_to_served" in canary.timings
    row = await deployment(harness)
    assert (row.canary_version_id, row.canary_share, row.canary_watched) == (version.id, 0.2, True)
    await add_turns(harness, version, 4, 4)
    await reconcile(harness.db, harness.settings)
    assert (await deployment(harness)).canary_version_id == version.id, "the canary is not decided yet"
    assert await assemble(harness.db, harness.settings) == 0
    waiting_for = (await harness.api.get("/v1/policies/shop/training")).json()["waiting_for"]
    assert waiting_for == "shop@v1 is a canary: learning continues when it is live or rolled back."


async def test_worse_canary_is_rolled_back_and_training_continues_from_the_serving_version(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    base = await harness.serving()
    version = await start_canary(harness)
    await add_turns(harness, base, 40, 10)
    await add_turns(harness, version, 5, 25)
    await reconcile(harness.db, harness.settings)
    ended: Version = await harness.get(Version, version.id)
    assert ended.state == VersionState.ROLLED_BACK and "less approval: 17% of 30 rated" in (ended.reason or "")
    assert (await deployment(harness)).canary_version_id is None
    assert (await harness.policy()).head_version_id == base.id == (await harness.serving()).id
    entries = [row for row in await harness.all(Audit) if row.action == "canary.ended"]
    assert [(row.actor, row.reason) for row in entries] == [("reconcile", ended.reason)]


async def test_canary_that_learns_of_an_erasure_while_it_runs_is_not_promoted(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    base = await harness.serving()
    version = await start_canary(harness)
    await add_turns(harness, base, 80, 20)
    await add_turns(harness, version, 45, 5)
    async with harness.db.write() as session:
        (await session.get_one(Version, version.id)).tainted_at = now()
    await reconcile(harness.db, harness.settings)
    ended: Version = await harness.get(Version, version.id)
    assert ended.state == VersionState.ROLLED_BACK and "data that was erased" in (ended.reason or "")
    assert (await deployment(harness)).canary_version_id is None
    assert (await harness.serving()).id == base.id == (await harness.policy()).head_version_id
    [entry] = [row for row in await harness.all(Audit) if row.action == "canary.ended"]
    assert (entry.actor, entry.reason) == ("reconcile", ended.reason)


async def test_canary_that_is_not_worse_goes_live(harness: Harness, scripted: ScriptedEngine) -> None:
    base = await harness.serving()
    version = await start_canary(harness)
    await add_turns(harness, base, 80, 20)
    await add_turns(harness, version, 45, 5)
    await reconcile(harness.db, harness.settings)
    assert (await harness.serving()).id == version.id
    assert (await harness.get(Version, version.id)).state == VersionState.LIVE
    assert (await deployment(harness)).canary_version_id is None
    assert (await harness.policy()).head_version_id == version.id


async def test_one_rater_has_one_vote(harness: Harness, scripted: ScriptedEngine) -> None:
    version = await start_canary(harness)
    await add_turns(harness, await harness.serving(), 40, 10)
    await add_turns(harness, version, 0, 60, raters=1)
    await reconcile(harness.db, harness.settings)
    assert (await deployment(harness)).canary_version_id == version.id
    canary = (await harness.api.get("/v1/policies/shop/deployment")).json()["canary"]
    assert (canary["candidate"]["turns"], canary["candidate"]["rated"], canary["verdict"]) == (60, 1, "wait")


async def test_programs_and_reward_sources_have_no_vote(harness: Harness, scripted: ScriptedEngine) -> None:
    version = await start_canary(harness)
    await add_turns(harness, version, 2, 1)
    await add_turns(harness, version, 3, 4, kind="CODE", raters=1)
    await add_turns(harness, version, 3, 0, kind="LLM_JUDGE")
    await add_turns(harness, version, 30, 0, kind=None)
    candidate = (await harness.api.get("/v1/policies/shop/deployment")).json()["canary"]["candidate"]
    assert (candidate["turns"], candidate["rated"], candidate["good"]) == (43, 3, 2)
    assert candidate["approval"] == 2 / 3  # Wilson's interval of 2 of 3
    assert (candidate["approval_low"], candidate["approval_high"]) == pytest.approx((0.2077, 0.9385), abs=1e-4)


async def test_pinned_and_explicit_requests_are_not_compared(harness: Harness, scripted: ScriptedEngine) -> None:
    version = await start_canary(harness)
    await add_turns(harness, await harness.serving(), 40, 10)
    await add_turns(harness, version, 0, 30, route_reason=RouteReason.REQUESTED)
    await add_turns(harness, version, 0, 30, route_reason=RouteReason.PINNED)
    await reconcile(harness.db, harness.settings)
    assert (await deployment(harness)).canary_version_id == version.id


async def test_failures_roll_the_canary_back_without_feedback(harness: Harness, scripted: ScriptedEngine) -> None:
    version = await start_canary(harness)
    for _ in range(40):
        await harness.turn(route_reason=RouteReason.STABLE, **ONE_SECOND)
        await harness.turn(
            version, route_reason=RouteReason.CANARY, state=TurnState.FAILED, output_ids=None, **ONE_SECOND
        )
    await reconcile(harness.db, harness.settings)
    assert "more replies failed" in ((await harness.get(Version, version.id)).reason or "")


async def test_requests_that_the_engine_refused_do_not_count_against_the_canary(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    version = await start_canary(harness)
    for _ in range(40):
        await harness.turn(route_reason=RouteReason.STABLE, **ONE_SECOND)
        await harness.turn(
            version, route_reason=RouteReason.CANARY, state=TurnState.REFUSED, output_ids=None, **ONE_SECOND
        )
    scripted.refuse_status = 400
    async with harness.db.write() as session:
        (await session.get_one(Deployment, (await harness.policy()).id)).canary_share = 1.0
    body = {"model": "shop", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
    answer = await harness.api.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.headers["x-policy-version"]) == (400, "shop@v1")
    scripted.refuse_status = None
    await reconcile(harness.db, harness.settings)
    assert (await deployment(harness)).canary_version_id == version.id
    canary = (await harness.api.get("/v1/policies/shop/deployment")).json()["canary"]
    assert (canary["candidate"]["turns"], canary["candidate"]["failed"]) == (0, 0), "they are no users"
    scripted.refuse_status = 500
    assert (await harness.api.post("/v1/chat/completions", json=body)).status_code == 503
    candidate = (await harness.api.get("/v1/policies/shop/deployment")).json()["canary"]["candidate"]
    assert (candidate["turns"], candidate["failed"]) == (1, 1)


async def test_background_tasks_of_front_ends_do_not_count(harness: Harness, scripted: ScriptedEngine) -> None:
    version = await start_canary(harness)
    task: dict[str, Any] = {"origin": Origin.TASK, "exclusion_reason": "task: title_generation"}
    await add_turns(harness, version, 0, 30, **task)
    for _ in range(30):
        await harness.turn(version, route_reason=RouteReason.CANARY, state=TurnState.FAILED, **task)
    await add_turns(harness, version, 3, 0)
    candidate = (await harness.api.get("/v1/policies/shop/deployment")).json()["canary"]["candidate"]
    assert (candidate["turns"], candidate["failed"], candidate["rated"], candidate["good"]) == (3, 0, 3, 3)


async def test_repeated_failures_of_one_user_count_once(harness: Harness, scripted: ScriptedEngine) -> None:
    version = await start_canary(harness)
    for number in range(40):
        await harness.turn(route_reason=RouteReason.STABLE, end_user=f"user-{number}", **ONE_SECOND)
        await harness.turn(
            version, route_reason=RouteReason.CANARY, state=TurnState.FAILED, output_ids=None, end_user="ada"
        )
        await harness.turn(version, route_reason=RouteReason.CANARY, end_user=f"user-{number}", **ONE_SECOND)
    await reconcile(harness.db, harness.settings)
    candidate = (await harness.api.get("/v1/policies/shop/deployment")).json()["canary"]["candidate"]
    assert (candidate["turns"], candidate["failed"]) == (41, 1)


async def test_canary_without_feedback_is_rolled_back(harness: Harness, scripted: ScriptedEngine) -> None:
    version = await start_canary(harness)
    async with harness.db.write() as session:
        row = await session.get_one(Deployment, (await harness.policy()).id)
        assert row.canary_since is not None
        row.canary_since -= CONFIG.patience_seconds + 1
    await reconcile(harness.db, harness.settings)
    ended: Version = await harness.get(Version, version.id)
    assert ended.state == VersionState.ROLLED_BACK and "not enough data" in (ended.reason or "")


async def test_unwatched_canary_is_not_decided_automatically(harness: Harness, scripted: ScriptedEngine) -> None:
    version = await start_canary(harness)
    async with harness.db.write() as session:
        (await session.get_one(Deployment, (await harness.policy()).id)).canary_watched = False
    await add_turns(harness, await harness.serving(), 40, 10)
    await add_turns(harness, version, 0, 50)
    await reconcile(harness.db, harness.settings)
    assert (await deployment(harness)).canary_version_id == version.id


async def test_canary_stays_loaded_and_a_second_version_waits(harness: Harness, scripted: ScriptedEngine) -> None:
    first = await start_canary(harness)
    second = await create_trained_version(harness, 2)
    await evaluate(harness.db, harness.settings, "test")
    for _ in range(harness.settings.workers.max_attempts + 1):
        await publish(harness.db, harness.settings)
    waiting: Version = await harness.get(Version, second.id)
    assert (waiting.state, waiting.attempt) == (VersionState.VERIFIED, 0), "waiting does not count as an attempt"
    await reconcile(harness.db, harness.settings.replace({"release.keep_versions": 0}))
    assert {"shop-v1", "shop-v2"} <= set(scripted.adapters)
    async with harness.db.write() as session:  # an operator promotes the first version
        (await session.get_one(Deployment, (await harness.policy()).id)).canary_watched = False
    await harness.api.post("/v1/policies/shop/canary/promote", json={})
    assert (await harness.serving()).id == first.id


async def test_pinned_version_is_loaded_again_on_an_engine_that_lost_it(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    settings = harness.settings.replace({"release.canary": None, "release.keep_versions": 0})
    versions = []
    for number in range(1, 5):
        versions.append(await create_trained_version(harness, number))
        await evaluate(harness.db, settings, "test")
    await reconcile(harness.db, settings)
    assert set(scripted.adapters) == {"shop-v3", "shop-v4"}
    policy = await harness.policy()
    for at, user in ((0, "ada"), (1, "bob")):
        values = {"project_id": policy.project_id, "policy_id": policy.id, "version_id": versions[at].id}
        async with harness.db.write() as session:
            session.add(Pin(id=new_id("pin"), kind=PinKind.USER, subject=user, actor="test", **values))
    flip(Path(versions[1].adapter_path or "") / "adapter_model.safetensors")
    await sync_adapters(harness.db, settings)
    [engine] = await harness.all(Engine)
    assert set(scripted.adapters) == {"shop-v1", "shop-v3", "shop-v4"} == set(engine.loaded), (
        "the damaged version is not loaded"
    )
    body = {"model": "shop", "messages": [{"role": "user", "content": "hi"}], "user": "ada"}
    answer = await harness.api.post("/v1/chat/completions", json=body)
    assert answer.headers["x-policy-version"] == "shop@v1"
    [turn] = await harness.all(Turn)
    assert (turn.version_id, turn.route_reason) == (versions[0].id, RouteReason.PINNED)
    await reconcile(harness.db, settings)
    assert "shop-v1" in scripted.adapters, "the pinned version stays loaded"


async def start_watched_canary(harness: Harness, number: int) -> None:
    """Start a watched canary as an operator does."""
    answer = await harness.api.post("/v1/policies/shop/deploy", json={"version": number, "share": 0.2})
    assert answer.status_code == 200, answer.text


@pytest.fixture
async def three_versions(harness: Harness, scripted: ScriptedEngine) -> list[Version]:
    """Publish three versions in turn; the third serves."""
    versions = []
    for number in range(1, 4):
        versions.append(await create_trained_version(harness, number))
        await evaluate(harness.db, harness.settings.replace({"release.canary": None}), "test")
    return versions


async def test_training_continues_from_an_older_promoted_version(
    harness: Harness, three_versions: list[Version]
) -> None:
    await start_watched_canary(harness, 1)
    await add_turns(harness, three_versions[2], 40, 40, route_reason=RouteReason.STABLE)
    await add_turns(harness, three_versions[0], 50, 0)
    await reconcile(harness.db, harness.settings)
    assert (await harness.serving()).id == three_versions[0].id == (await harness.policy()).head_version_id


async def test_version_trained_during_an_older_canary_is_published_after_it(
    harness: Harness, three_versions: list[Version]
) -> None:
    await start_watched_canary(harness, 1)
    newest = await create_trained_version(harness, 4)
    await evaluate(harness.db, harness.settings.replace({"release.canary": None}), "test")
    assert (await harness.get(Version, newest.id)).state == VersionState.VERIFIED, (
        "the version that the canary is compared with keeps serving"
    )
    await harness.api.post("/v1/policies/shop/canary/abort", json={})
    assert (await harness.policy()).head_version_id == newest.id
    await publish(harness.db, harness.settings.replace({"release.canary": None}))
    assert (await harness.serving()).id == newest.id


async def test_version_that_was_only_a_canary_is_unloaded(harness: Harness, three_versions: list[Version]) -> None:
    settings = harness.settings.replace({"release.keep_versions": 3})
    for number in range(4, 8):
        name = f"shop-v{number}"
        await harness.version(number=number, adapter_name=name, **export_values(harness, name, number))
        await evaluate(harness.db, harness.settings, "test")
        await harness.api.post("/v1/policies/shop/canary/abort", json={})
    await reconcile(harness.db, settings)
    [engine] = await harness.all(Engine)
    assert engine.loaded == ["shop-v1", "shop-v2", "shop-v3"]


async def test_canary_is_not_promoted_without_a_ready_engine(harness: Harness, scripted: ScriptedEngine) -> None:
    version = await start_canary(harness)
    await add_turns(harness, await harness.serving(), 80, 20)
    await add_turns(harness, version, 50, 0)
    async with harness.db.write() as session:
        assert await inventory.serving_adapter_names(session) == set(), "an engine may become ready without the canary"
        (await session.get_one(Engine, "engine-0")).state = EngineState.DOWN
    await check_canaries(harness.db, harness.settings)
    assert (await deployment(harness)).canary_version_id == version.id


async def test_canary_that_cannot_be_decided_does_not_stop_the_reconciler(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    await start_canary(harness)
    async with harness.db.write() as session:
        (await session.get_one(Policy, (await harness.policy()).id)).canary = {"share": "much"}
    assert await check_canaries(harness.db, harness.settings) == 0
