"""Trained → proven → live: nothing damaged or wrong reaches the people, nothing good is lost."""

from pathlib import Path
from typing import Any

import pytest

from alignment.manifest import ADAPTER
from app.models import Audit, Engine, EngineState, Version, VersionState
from tests.adapters import make_adapter
from tests.ring import Ring
from tests.scripted_engine import ScriptedEngine, logprob, serving
from workers.evaluate import evaluate
from workers.publish import publish
from workers.sweep import retire

IDS = [[5, 6, 7, 8], [9, 10]]


async def trained(ring: Ring, number: int = 1) -> Version:
    """A version as the trainer leaves it: sealed on disk, with the log-probs that the engine should find."""
    name = f"shop-v{number}"
    path = ring.settings.versions_dir / name
    sha256 = make_adapter(path, Path(ring.settings.model), seed=number)
    probe = {"ids": IDS, "logprobs": [[logprob(name, ids[:at], ids[at]) for at in range(1, len(ids))] for ids in IDS]}
    return await ring.version(adapter_path=str(path), manifest_sha256=sha256, probe=probe)


async def come_home(ring: Ring) -> None:
    await evaluate(ring.db, ring.settings, "test")
    await publish(ring.db, ring.settings, "test")


async def test_a_version_is_loaded_warmed_proven_and_then_serves(ring: Ring, scripted: ScriptedEngine) -> None:
    base, version = await ring.serving(), await trained(ring)
    await come_home(ring)
    home: Version = await ring.get(Version, version.id)
    assert (await ring.serving()).id == version.id
    assert home.state == VersionState.LIVE and home.lease_owner is None
    assert (await ring.get(Version, base.id)).state == VersionState.SUPERSEDED
    assert scripted.adapters == {"shop-v1": home.adapter_path}
    assert (await ring.all(Engine))[0].loaded == ["shop-v1"]
    assert {"check", "load", "warm", "verify", "switch", "trained_to_served"} <= home.timings.keys()
    answer = await ring.api.post(
        "/v1/chat/completions", json={"model": "shop", "messages": [{"role": "user", "content": "hi"}]}
    )
    assert (answer.headers["x-policy-version"], scripted.heard[-1]["lora_path"]) == ("shop@v1", "shop-v1")


async def test_weights_that_are_not_the_trainers_never_serve(ring: Ring, scripted: ScriptedEngine) -> None:
    base, version = await ring.serving(), await trained(ring)
    async with ring.db.write() as session:
        row = await session.get_one(Version, version.id)
        row.probe = {"ids": IDS, "logprobs": [[-0.1] * (len(ids) - 1) for ids in IDS]}
    await come_home(ring)
    rejected = await ring.get(Version, version.id)
    assert rejected.state == VersionState.REJECTED and "differ from the trainer's" in rejected.reason
    assert (await ring.serving()).id == base.id
    assert (await ring.policy()).head_version_id == base.id, "learning goes back to what serves"
    assert "version rejected" in [row.action for row in await ring.all(Audit)]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [flip, Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1])])
async def test_a_damaged_adapter_never_reaches_the_engine(ring: Ring, scripted: ScriptedEngine, damage: Any) -> None:
    version = await trained(ring)
    damage(Path(version.adapter_path or "") / ADAPTER)
    await come_home(ring)
    rejected = await ring.get(Version, version.id)
    assert rejected.state == VersionState.REJECTED and "DamagedAdapter" in rejected.reason
    assert scripted.adapters == {} and scripted.heard == []


async def test_a_version_waits_for_an_engine_that_is_away(ring: Ring) -> None:
    version = await trained(ring)
    await come_home(ring)
    waiting = await ring.get(Version, version.id)
    assert (waiting.state, waiting.lease_owner) == (VersionState.TRAINED, None)


async def test_a_version_goes_live_only_when_every_ready_engine_holds_it(ring: Ring, scripted: ScriptedEngine) -> None:
    version = await trained(ring)
    await evaluate(ring.db, ring.settings, "test")
    second = ScriptedEngine()
    with serving(second) as url:
        async with ring.db.write() as session:
            session.add(Engine(name="engine-1", url=url, state=EngineState.READY, incarnation=1, loaded=[]))
        await publish(ring.db, ring.settings, "test")
        assert (await ring.serving()).number == 0, "the engine that has just come does not hold it"
        await come_home(ring)
    assert (await ring.serving()).id == version.id
    assert "shop-v1" in second.adapters


async def test_a_rollback_on_the_way_home_leaves_the_version_outside(ring: Ring, scripted: ScriptedEngine) -> None:
    base = await ring.serving()
    await trained(ring)
    await evaluate(ring.db, ring.settings, "test")
    policy = await ring.policy()
    async with ring.db.write() as session:
        (await session.get_one(type(policy), policy.id)).head_version_id = base.id
    await publish(ring.db, ring.settings, "test")
    assert (await ring.serving()).id == base.id
    assert (await ring.all(Version))[-1].state == VersionState.REJECTED


async def test_old_versions_are_unloaded_lazily_and_rollback_targets_kept(ring: Ring, scripted: ScriptedEngine) -> None:
    settings = ring.settings.model_copy(update={"keep_versions": 2})
    for number in range(1, 6):
        await trained(ring, number)
        await come_home(ring)
    await retire(ring.db, settings)
    assert set(scripted.adapters) == {"shop-v4", "shop-v5"}
    assert (await ring.all(Engine))[0].loaded == ["shop-v4", "shop-v5"]
    answer = await ring.api.post("/v1/policies/shop/rollback", json={})
    assert answer.json()["serving"] == "shop@v4"
