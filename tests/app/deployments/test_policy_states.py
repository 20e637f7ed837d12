"""Policies are paused, archived, brought back and deleted: what their chats, training and files do then."""

import httpx2
import pytest

from app.engines import inventory
from app.models import (
    Audit,
    AuditAction,
    Batch,
    BatchState,
    Deployment,
    Engine,
    Policy,
    PolicyState,
    Sample,
    SampleState,
    Turn,
    Version,
    VersionState,
    new_id,
)
from tests.support.deployment import Harness
from tests.support.turns import make_turn
from workers.curate import curate
from workers.retention import remove_expired
from workers.training import batch_claims
from workers.training.assemble import assemble

POLICIES = "/v1/policies"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


async def act(harness: Harness, name: str, verb: str, reason: str | None = None) -> httpx2.Response:
    return await harness.api.post(f"{POLICIES}/{name}/{verb}", json={"reason": reason})


async def create_second(harness: Harness) -> Policy:
    response = await harness.api.post(POLICIES, json={"name": "support"})
    assert response.status_code == 201, response.text
    row: Policy = await harness.get(Policy, response.json()["id"])
    return row


async def rate(harness: Harness, policy: Policy, thumbs: str) -> None:
    """Create one rated turn of the policy's version 0 per character, + or -."""
    [version] = [row for row in await harness.all(Version) if row.policy_id == policy.id and row.number == 0]
    for thumb in thumbs:
        turn = make_turn(policy, version, new_id("chatcmpl"))
        async with harness.db.write() as session:
            session.add(turn)
        assert (await harness.vote(turn.id, "up" if thumb == "+" else "down")).status_code == 201
    await curate(harness.db, harness.settings)


async def test_paused_policy_answers_and_is_not_trained(harness: Harness) -> None:
    policy = await create_second(harness)
    await rate(harness, policy, "+-" * 4)
    assert (await act(harness, "support", "pause", "too many thumbs down")).json()["state"] == "paused"
    assert await assemble(harness.db, harness.settings) == 0
    training = (await harness.api.get(f"{POLICIES}/support/training")).json()
    assert training["waiting_for"].startswith("The policy is paused")
    assert (await harness.api.post(f"{POLICIES}/support/training/trigger", json={})).status_code == 409
    assert (await harness.api.get("/v1/models/support")).status_code == 200
    assert (await act(harness, "support", "resume")).json()["state"] == "active"
    assert await assemble(harness.db, harness.settings) == 1
    [entry] = [entry for entry in await harness.all(Audit) if entry.action == AuditAction.POLICY_PAUSED]
    assert (entry.subject, entry.reason, entry.details) == ("support", "too many thumbs down", {"previous": "active"})


async def test_batch_of_a_paused_policy_is_not_claimed(harness: Harness) -> None:
    policy = await create_second(harness)
    await rate(harness, policy, "+-" * 4)
    assert await assemble(harness.db, harness.settings) == 1
    await act(harness, "support", "pause")
    assert await batch_claims.claim(harness.db, "trainer", harness.settings) is None
    await act(harness, "support", "resume")
    assert await batch_claims.claim(harness.db, "trainer", harness.settings) is not None


async def test_archived_policy_answers_no_chat_and_can_be_brought_back(harness: Harness) -> None:
    policy = await create_second(harness)
    version = await add_version(harness, policy, "/nowhere/support-v1", VersionState.LIVE)
    async with harness.db.read() as session:
        assert version.id in {row.id for row in await inventory.wanted_versions(session, 4)}
    assert (await act(harness, "support", "archive")).json()["state"] == "archived"
    for model in ("support", "support@v1", "support@stable"):
        refused = await harness.api.post("/v1/chat/completions", json={"model": model, **CHAT})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "policy_archived")
        assert "/v1/policies/support/unarchive" in refused.json()["error"]["message"]
    assert (await harness.api.get("/v1/models/support")).status_code == 404
    assert "support" not in {row["id"] for row in (await harness.api.get("/v1/models")).json()["data"]}
    names = [row["name"] for row in (await harness.api.get(POLICIES)).json()["data"]]
    assert names == ["shop"]
    assert len((await harness.api.get(POLICIES, params={"archived": True})).json()["data"]) == 2
    assert (await harness.api.get("/readyz")).status_code == 200, "an archived policy keeps no API from being ready"
    async with harness.db.read() as session:
        assert version.id not in {row.id for row in await inventory.wanted_versions(session, 4)}
    assert (await act(harness, "support", "resume")).json()["error"]["code"] == "policy_archived"
    assert (await act(harness, "support", "unarchive")).json()["state"] == "active"
    refused = await harness.api.post("/v1/chat/completions", json={"model": "support", **CHAT})
    assert refused.status_code != 404, "it is answered as soon as the engine has its version again"


@pytest.mark.parametrize("verb", ["archive", "delete"])
async def test_default_policy_can_be_neither_archived_nor_deleted(harness: Harness, verb: str) -> None:
    await create_second(harness)
    url = f"{POLICIES}/{harness.settings.policy}"
    response = await (harness.api.delete(url) if verb == "delete" else harness.api.post(f"{url}/archive", json={}))
    assert (response.status_code, response.json()["error"]["code"]) == (409, "default_policy")


async def test_deleted_policy_is_removed_by_retention(harness: Harness) -> None:
    policy = await create_second(harness)
    await rate(harness, policy, "+-" * 4 + "+")
    assert await assemble(harness.db, harness.settings) == 1
    folder = harness.settings.versions_dir / "support-v1"
    folder.mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    version = await add_version(harness, policy, str(folder), VersionState.LIVE)
    refused = await harness.api.delete(f"{POLICIES}/support")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "policy_not_archived")
    await act(harness, "support", "archive")
    deleted = await harness.api.delete(f"{POLICIES}/support")
    assert deleted.json() == {"object": "policy.deleted", "id": policy.id, "name": "support", "deleted": True}
    assert (await harness.api.get(f"{POLICIES}/support")).status_code == 404
    assert len((await harness.api.get(POLICIES, params={"archived": True})).json()["data"]) == 1

    await remove_expired(harness.db, harness.settings)
    assert not folder.exists() and (await harness.get(Version, version.id)).pruned_at is not None
    assert {sample.state for sample in await harness.all(Sample)} == {SampleState.DROPPED}
    assert {batch.state for batch in await harness.all(Batch)} == {BatchState.FAILED}
    turns = await harness.all(Turn)
    assert len(turns) == 9 and all(turn.deleted_at is None for turn in turns), "they go when the project's turns do"
    row = await harness.get(Policy, policy.id)
    assert row.state == PolicyState.DELETED and row.name != "support"
    assert (await harness.api.post(POLICIES, json={"name": "support"})).status_code == 201, "the name is free"
    assert await remove_expired(harness.db, harness.settings) == 0


async def add_version(harness: Harness, policy: Policy, path: str, state: VersionState) -> Version:
    """Add version 1, which serves and which the engine has loaded, and make it the head."""
    async with harness.db.write() as session:
        version = Version(
            id=new_id("ver"),
            policy_id=policy.id,
            number=1,
            parent_id=policy.head_version_id,
            state=state,
            adapter_name=f"{policy.name}-v1",
            adapter_path=path,
            live_at=1.0,
        )
        session.add(version)
        await session.flush()
        (await session.get_one(Policy, policy.id)).head_version_id = version.id
        deployment = await session.get_one(Deployment, policy.id)
        deployment.version_id = version.id
        (await session.get_one(Engine, "engine-0")).loaded = []
    return version
