"""Proven → canary → live or taken back, by itself; and what is wanted is brought back to an engine that lacks it."""

import itertools
from pathlib import Path

import pytest

from alignment.release.canary import CanaryConfig
from app.core.database import now
from app.core.settings import Settings
from app.models import (
    Audit,
    Deployment,
    Engine,
    EngineState,
    Held,
    Pin,
    Policy,
    Reward,
    Routed,
    Turn,
    TurnState,
    Version,
    VersionState,
    new_id,
)
from tests.support.deployment import Ring
from tests.support.scripted_engine import ScriptedEngine
from tests.workers.release.test_publish import flip, sealed, trained
from workers.reconcile import sweep
from workers.release import engine_inventory
from workers.release.adapter_sync import furnish
from workers.release.canary import watch
from workers.release.evaluate import evaluate
from workers.release.publish import publish
from workers.training.assemble import assemble

COUNT = itertools.count()
TOOK = {"finished_at": now() + 1.0}  # a second each: neither side is slower
CONFIG = CanaryConfig(share=0.2, margin=0.3)


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"canary": CONFIG})


async def out(ring: Ring) -> Version:
    """A version that has just gone out to a share."""
    version = await trained(ring)
    await evaluate(ring.db, ring.settings, "test")
    return version


async def hear(
    ring: Ring,
    version: Version,
    good: int,
    bad: int,
    *,
    raters: int | None = None,
    kind: str | None = "HUMAN",
    **values: object,
) -> None:
    """So many replies of a version, and what as many people (or so many) made of them. Without a kind of rater: what a
    source of the policy's own did."""
    for at in range(good + bad):
        values = {"routed": Routed.CANARY if version.number else Routed.STABLE, **TOOK, **values}
        turn = await ring.turn(version, **values)
        rater = None if kind is None else f"{kind}/user-{next(COUNT) if raters is None else at % raters}"
        row = Reward(id=new_id("rw"), turn_id=turn.id, source=f"app/{rater}", rater=rater, value=1 if at < good else -1)
        async with ring.db.write() as session:
            session.add(row)


async def deployment(ring: Ring) -> Deployment:
    row: Deployment = await ring.get(Deployment, (await ring.policy()).id)
    return row


async def test_a_new_version_goes_out_to_a_share_first_and_learning_waits_for_it(
    ring: Ring, scripted: ScriptedEngine
) -> None:
    base = await ring.serving()
    version = await out(ring)
    assert (await ring.serving()).id == base.id
    home: Version = await ring.get(Version, version.id)
    assert home.state == VersionState.CANARY and "trained_to_served" in home.timings
    pointer = await deployment(ring)
    assert (pointer.canary_version_id, pointer.canary_share, pointer.canary_watched) == (version.id, 0.2, True)
    await hear(ring, version, 4, 4)
    await sweep(ring.db, ring.settings)
    assert (await deployment(ring)).canary_version_id == version.id, "nothing is decided yet"
    assert await assemble(ring.db, ring.settings) == 0
    told = (await ring.api.get("/v1/policies/shop/training")).json()["missing"]
    assert told == "shop@v1 is a canary: learning goes on when it is live, or taken back."


async def test_a_worse_one_is_taken_back_and_learning_goes_on_from_what_serves(
    ring: Ring, scripted: ScriptedEngine
) -> None:
    base = await ring.serving()
    version = await out(ring)
    await hear(ring, base, 40, 10)
    await hear(ring, version, 5, 25)
    await sweep(ring.db, ring.settings)
    taken: Version = await ring.get(Version, version.id)
    assert taken.state == VersionState.ROLLED_BACK and "less approval: 17% of 30 rated" in (taken.reason or "")
    assert (await deployment(ring)).canary_version_id is None
    assert (await ring.policy()).head_version_id == base.id == (await ring.serving()).id
    ended = [row for row in await ring.all(Audit) if row.action == "canary ended"]
    assert [(row.actor, row.reason) for row in ended] == [("watch", taken.reason)]


async def test_one_that_is_as_good_goes_live(ring: Ring, scripted: ScriptedEngine) -> None:
    base = await ring.serving()
    version = await out(ring)
    await hear(ring, base, 80, 20)
    await hear(ring, version, 45, 5)
    await sweep(ring.db, ring.settings)
    assert (await ring.serving()).id == version.id
    assert (await ring.get(Version, version.id)).state == VersionState.LIVE
    assert (await deployment(ring)).canary_version_id is None
    assert (await ring.policy()).head_version_id == version.id


async def test_one_voice_is_one_vote_however_loud(ring: Ring, scripted: ScriptedEngine) -> None:
    version = await out(ring)
    await hear(ring, await ring.serving(), 40, 10)
    await hear(ring, version, 0, 60, raters=1)
    await sweep(ring.db, ring.settings)
    assert (await deployment(ring)).canary_version_id == version.id
    shown = (await ring.api.get("/v1/policies/shop/deployment")).json()["canary"]
    assert (shown["candidate"]["turns"], shown["candidate"]["rated"], shown["verdict"]) == (60, 1, "wait")


async def test_a_program_has_a_vote_for_each_reply_and_the_policys_own_sources_have_none(
    ring: Ring, scripted: ScriptedEngine
) -> None:
    version = await out(ring)
    await hear(ring, version, 3, 4, kind="CODE", raters=1)
    await hear(ring, version, 30, 0, kind=None)
    shown = (await ring.api.get("/v1/policies/shop/deployment")).json()["canary"]["candidate"]
    assert (shown["turns"], shown["rated"], shown["good"]) == (37, 7, 3)


async def test_who_asked_for_a_version_or_is_pinned_to_it_is_not_compared(ring: Ring, scripted: ScriptedEngine) -> None:
    version = await out(ring)
    await hear(ring, await ring.serving(), 40, 10)
    await hear(ring, version, 0, 30, routed=Routed.ASKED)
    await hear(ring, version, 0, 30, routed=Routed.PINNED)
    await sweep(ring.db, ring.settings)
    assert (await deployment(ring)).canary_version_id == version.id


async def test_failures_take_it_back_without_a_word_from_anybody(ring: Ring, scripted: ScriptedEngine) -> None:
    version = await out(ring)
    for _ in range(40):
        await ring.turn(routed=Routed.STABLE, **TOOK)
        await ring.turn(version, routed=Routed.CANARY, state=TurnState.FAILED, output_ids=None, **TOOK)
    await sweep(ring.db, ring.settings)
    assert "more replies failed" in ((await ring.get(Version, version.id)).reason or "")


async def test_one_speaker_whose_replies_fail_again_and_again_is_one(ring: Ring, scripted: ScriptedEngine) -> None:
    version = await out(ring)
    for number in range(40):
        await ring.turn(routed=Routed.STABLE, end_user=f"user-{number}", **TOOK)
        await ring.turn(version, routed=Routed.CANARY, state=TurnState.FAILED, output_ids=None, end_user="ada")
        await ring.turn(version, routed=Routed.CANARY, end_user=f"user-{number}", **TOOK)
    await sweep(ring.db, ring.settings)
    shown = (await ring.api.get("/v1/policies/shop/deployment")).json()["canary"]["candidate"]
    assert (shown["turns"], shown["failed"]) == (41, 1)


async def test_silence_counts_against_it(ring: Ring, scripted: ScriptedEngine) -> None:
    version = await out(ring)
    async with ring.db.write() as session:
        row = await session.get_one(Deployment, (await ring.policy()).id)
        assert row.canary_since is not None
        row.canary_since -= CONFIG.patience_seconds + 1
    await sweep(ring.db, ring.settings)
    taken: Version = await ring.get(Version, version.id)
    assert taken.state == VersionState.ROLLED_BACK and "not enough was heard" in (taken.reason or "")


async def test_one_that_a_person_watches_is_left_to_him(ring: Ring, scripted: ScriptedEngine) -> None:
    version = await out(ring)
    async with ring.db.write() as session:
        (await session.get_one(Deployment, (await ring.policy()).id)).canary_watched = False
    await hear(ring, await ring.serving(), 40, 10)
    await hear(ring, version, 0, 50)
    await sweep(ring.db, ring.settings)
    assert (await deployment(ring)).canary_version_id == version.id


async def test_a_canary_is_kept_loaded_and_a_second_version_waits(ring: Ring, scripted: ScriptedEngine) -> None:
    first = await out(ring)
    second = await trained(ring, 2)
    await evaluate(ring.db, ring.settings, "test")
    for _ in range(ring.settings.max_attempts + 1):
        await publish(ring.db, ring.settings)
    waiting: Version = await ring.get(Version, second.id)
    assert (waiting.state, waiting.attempt) == (VersionState.PROVEN, 0), "to wait is no attempt"
    await sweep(ring.db, ring.settings.model_copy(update={"keep_versions": 0}))
    assert {"shop-v1", "shop-v2"} <= set(scripted.adapters)
    async with ring.db.write() as session:  # the first is promoted by hand; the second has its turn
        (await session.get_one(Deployment, (await ring.policy()).id)).canary_watched = False
    await ring.api.post("/v1/policies/shop/canary/promote", json={})
    assert (await ring.serving()).id == first.id


async def test_what_is_pinned_is_brought_back_to_an_engine_that_lacks_it(ring: Ring, scripted: ScriptedEngine) -> None:
    settings = ring.settings.model_copy(update={"canary": None, "keep_versions": 0})
    versions = []
    for number in range(1, 5):
        versions.append(await trained(ring, number))
        await evaluate(ring.db, settings, "test")
    await sweep(ring.db, settings)
    assert set(scripted.adapters) == {"shop-v3", "shop-v4"}
    policy = await ring.policy()
    for at, user in ((0, "ada"), (1, "bob")):
        held = {"project_id": policy.project_id, "policy_id": policy.id, "version_id": versions[at].id}
        async with ring.db.write() as session:
            session.add(Pin(id=new_id("pin"), kind=Held.USER, subject=user, actor="test", **held))
    flip(Path(versions[1].adapter_path or "") / "adapter_model.safetensors")
    await furnish(ring.db, settings)
    [engine] = await ring.all(Engine)
    assert set(scripted.adapters) == {"shop-v1", "shop-v3", "shop-v4"} == set(engine.loaded), (
        "the damaged one stays out"
    )
    body = {"model": "shop", "messages": [{"role": "user", "content": "hi"}], "user": "ada"}
    answer = await ring.api.post("/v1/chat/completions", json=body)
    assert answer.headers["x-policy-version"] == "shop@v1"
    [turn] = await ring.all(Turn)
    assert (turn.version_id, turn.routed) == (versions[0].id, Routed.PINNED)
    await sweep(ring.db, settings)
    assert "shop-v1" in scripted.adapters, "and it is kept"


async def by_hand(ring: Ring, number: int) -> None:
    """A watched canary that an operator has sent out."""
    answer = await ring.api.post("/v1/policies/shop/deploy", json={"version": number, "share": 0.2})
    assert answer.status_code == 200, answer.text


@pytest.fixture
async def three(ring: Ring, scripted: ScriptedEngine) -> list[Version]:
    """Three versions, published one after the other; the third serves."""
    versions = []
    for number in range(1, 4):
        versions.append(await trained(ring, number))
        await evaluate(ring.db, ring.settings.model_copy(update={"canary": None}), "test")
    return versions


async def test_learning_goes_on_from_an_older_version_that_was_promoted(ring: Ring, three: list[Version]) -> None:
    await by_hand(ring, 1)
    await hear(ring, three[2], 40, 40, routed=Routed.STABLE)
    await hear(ring, three[0], 50, 0)
    await sweep(ring.db, ring.settings)
    assert (await ring.serving()).id == three[0].id == (await ring.policy()).head_version_id


async def test_what_was_learned_beside_an_older_canary_outlives_it(ring: Ring, three: list[Version]) -> None:
    await by_hand(ring, 1)
    newest = await trained(ring, 4)
    await evaluate(ring.db, ring.settings.model_copy(update={"canary": None}), "test")
    assert (await ring.get(Version, newest.id)).state == VersionState.PROVEN, "what a canary is compared with stays"
    await ring.api.post("/v1/policies/shop/canary/end", json={})
    assert (await ring.policy()).head_version_id == newest.id
    await publish(ring.db, ring.settings.model_copy(update={"canary": None}))
    assert (await ring.serving()).id == newest.id


async def test_what_was_only_ever_a_canary_is_not_kept(ring: Ring, three: list[Version]) -> None:
    settings = ring.settings.model_copy(update={"keep_versions": 3})
    for number in range(4, 8):
        name = f"shop-v{number}"
        await ring.version(number=number, adapter_name=name, **sealed(ring, name, number))
        await evaluate(ring.db, ring.settings, "test")
        await ring.api.post("/v1/policies/shop/canary/end", json={})
    await sweep(ring.db, settings)
    [engine] = await ring.all(Engine)
    assert engine.loaded == ["shop-v1", "shop-v2", "shop-v3"]


async def test_nothing_is_promoted_while_no_engine_can_answer(ring: Ring, scripted: ScriptedEngine) -> None:
    version = await out(ring)
    await hear(ring, await ring.serving(), 80, 20)
    await hear(ring, version, 50, 0)
    async with ring.db.write() as session:
        assert await engine_inventory.serving(session) == set(), "an engine may open without the canary"
        (await session.get_one(Engine, "engine-0")).state = EngineState.DOWN
    await watch(ring.db, ring.settings)
    assert (await deployment(ring)).canary_version_id == version.id


async def test_a_policy_whose_canary_cannot_be_judged_does_not_stop_the_sweep(
    ring: Ring, scripted: ScriptedEngine
) -> None:
    await out(ring)
    async with ring.db.write() as session:
        (await session.get_one(Policy, (await ring.policy()).id)).canary = {"share": "much"}
    assert await watch(ring.db, ring.settings) == 0
