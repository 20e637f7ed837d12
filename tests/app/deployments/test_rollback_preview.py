"""The preview of a rollback says what the rollback then does, and changes nothing."""

from typing import Any

from sqlalchemy import select

from app.core.database import now
from app.deployments import service
from app.models import (
    Audit,
    Batch,
    BatchState,
    Deployment,
    Engine,
    Pin,
    PinKind,
    Policy,
    Reward,
    Sample,
    SampleState,
    Version,
    VersionState,
    new_id,
)
from app.policies.locks import lock_policy
from app.policies.service import Attribution
from tests.support.deployment import Harness
from tests.support.trained_versions import create_batch, create_version, publish

PATH = "/v1/policies/shop/rollback"


async def release(harness: Harness, *turns: Any) -> Version:
    """Create a version that learned from these turns, loaded and live."""
    version = await create_version(harness, *turns, state=VersionState.VERIFIED)
    async with harness.db.write() as session:
        engine = await session.get_one(Engine, "engine-0")
        engine.loaded = [*engine.loaded, version.adapter_name or ""]
        locked = await lock_policy(session, version.policy_id)
        row = await session.get_one(Version, version.id)
        await service.set_live(locked, row, Attribution("test", "test"))
    return version


async def judge(harness: Harness, version: Version) -> None:
    turn = await harness.turn(version, created_at=now(), conversation_id="judged")
    async with harness.db.write() as session:
        same = {"source": "default/HUMAN/ada", "rater": "HUMAN/ada", "value": 1.0}
        session.add(Reward(id=new_id("rew"), turn_id=turn.id, **same))


async def preview(harness: Harness, **params: int) -> Any:
    response = await harness.api.get(PATH, params=params)
    assert response.status_code == 200, response.text
    return response.json()


async def states(harness: Harness) -> dict[str, list[Any]]:
    """Return what a rollback may change."""
    async with harness.db.read() as session:
        columns = {
            "samples": select(Sample.turn_id, Sample.state, Sample.batch_id, Sample.reason).order_by(Sample.turn_id),
            "versions": select(Version.id, Version.state).order_by(Version.id),
            "batches": select(Batch.id, Batch.state, Batch.fence).order_by(Batch.id),
            "deployment": select(Deployment.version_id, Deployment.canary_version_id, Deployment.epoch),
            "head": select(Policy.head_version_id),
            "audit": select(Audit.seq, Audit.action).order_by(Audit.seq),
        }
        return {name: [tuple(row) for row in await session.execute(query)] for name, query in columns.items()}


async def test_preview_is_what_the_rollback_does(harness: Harness) -> None:
    turns = [await harness.turn() for _ in range(6)]
    await release(harness, *turns[:1])
    judged = await release(harness, *turns[1:3])
    await judge(harness, judged)
    last = await release(harness, *turns[3:5])
    for name in ("a", "a", "b"):
        await harness.turn(last, created_at=now(), conversation_id=name)
    await harness.turn(last, created_at=1.0, conversation_id="long ago")
    await create_batch(harness, turns[5])
    async with harness.db.write() as session:
        pinned = {"kind": PinKind.USER, "subject": "eve", "actor": "test", "policy_id": last.policy_id}
        session.add(Pin(id=new_id("pin"), project_id=turns[0].project_id, version_id=last.id, **pinned))
    before = await states(harness)
    seen = await preview(harness, version=1)
    assert await states(harness) == before
    assert (seen["serving"], seen["would_serve"], seen["rolled_back"]) == ("shop@v3", "shop@v1", "shop@v3")
    assert (seen["engines"], seen["engines_with_version"], seen["changes"]) == (1, 1, True)
    assert (seen["conversations"], seen["pins"], seen["aborted_canary"]) == (2, 1, None)
    assert (seen["head"], seen["head_after"], seen["joining"]) == ("shop@v3", "shop@v1", [])
    assert seen["leaving"] == ["shop@v3", "shop@v2"]
    counted = [seen[f"samples_{name}"] for name in ("returned", "dropped", "reclaimed")]
    assert (counted, seen["batches_failed"]) == ([2, 2, 0], 1)

    assert (await harness.api.post(PATH, json={"version": 1})).status_code == 200
    rows = {row.turn_id: row.state for row in await harness.all(Sample)}
    assert [rows[turn.id] for turn in turns] == [
        SampleState.TRAINED,
        *[SampleState.DROPPED] * 2,
        *[SampleState.OPEN] * 3,
    ]
    assert BatchState.FAILED in [batch.state for batch in await harness.all(Batch)]
    again = await preview(harness, version=1)
    assert (again["changes"], again["leaving"]) == (False, [])


async def test_preview_of_a_canarys_end(harness: Harness) -> None:
    await publish(harness)
    canary = await publish(harness)
    async with harness.db.write() as session:
        locked = await lock_policy(session, canary.policy_id)
        base = await session.get_one(Version, canary.parent_id)
        await service.set_live(locked, base, Attribution("test", None))
        row = await session.get_one(Version, canary.id)
        await service.start_canary(locked, row, 0.1, Attribution("test", None), watched=False)
    seen = await preview(harness)
    assert (seen["serving"], seen["would_serve"], seen["aborted_canary"]) == ("shop@v1", "shop@v1", "shop@v2")
    assert (await harness.get(Version, canary.id)).state == VersionState.CANARY


async def test_preview_is_refused_like_the_rollback(harness: Harness) -> None:
    for params, status in (({}, 409), ({"version": 7}, 404), ({"version": 1, "from_version": 2}, 400)):
        refused = await harness.api.get(PATH, params=params)
        assert refused.status_code == status, refused.text
        acted = await harness.api.post(PATH, json=params)
        assert acted.status_code == status
        if status != 400:
            assert acted.json()["error"] == refused.json()["error"]
