"""From trained to live: no damaged or wrong version serves, and every valid version is published."""

import asyncio
import base64
import errno
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from alignment.artifacts.specs import ADAPTER
from app.models import Audit, Engine, EngineState, LearningMode, Policy, Turn, Version, VersionState
from app.policies.locks import lock_policy
from app.training import kl_guard
from tests.support.adapters import make_adapter
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine, logprob, serve
from workers.release import adapter_sync
from workers.release.adapter_sync import sync_adapters, unload_unused_adapters
from workers.release.delivery.adapters import verify_on_engines
from workers.release.delivery.base import DeliveryResult
from workers.release.evaluate import evaluate
from workers.release.publish import publish

IDS = [[5, 6, 7, 8], [9, 10]]


async def create_trained_version(harness: Harness, number: int = 1) -> Version:
    """Create a version as the trainer does."""
    return await harness.version(**export_values(harness, f"shop-v{number}", number))


def export_values(harness: Harness, name: str, seed: int) -> dict[str, Any]:
    """Export an adapter, with the log-probs that the engine should compute."""
    path = harness.settings.versions_dir / name
    sha256 = make_adapter(path, Path(harness.settings.model), seed=seed)
    probe = {"ids": IDS, "logprobs": [[logprob(name, ids[:at], ids[at]) for at in range(1, len(ids))] for ids in IDS]}
    return {"adapter_path": str(path), "manifest_sha256": sha256, "probe": probe}


async def evaluate_and_publish(harness: Harness) -> None:
    await evaluate(harness.db, harness.settings, "test")
    await publish(harness.db, harness.settings)


async def test_version_is_loaded_verified_and_then_live(harness: Harness, scripted: ScriptedEngine) -> None:
    base, version = await harness.serving(), await create_trained_version(harness)
    await evaluate_and_publish(harness)
    released: Version = await harness.get(Version, version.id)
    assert (await harness.serving()).id == version.id
    assert released.state == VersionState.LIVE and released.lease_owner is None
    assert (await harness.get(Version, base.id)).state == VersionState.SUPERSEDED
    assert scripted.adapters == {"shop-v1": released.adapter_path}
    assert (await harness.all(Engine))[0].loaded == ["shop-v1"]
    assert {"wait", "reach", "check", "load", "verify", "switch", "trained_to_served"} <= released.timings.keys()
    answer = await harness.api.post(
        "/v1/chat/completions", json={"model": "shop", "messages": [{"role": "user", "content": "hi"}]}
    )
    assert (answer.headers["x-policy-version"], scripted.requests[-1]["lora_path"]) == ("shop@v1", "shop-v1")


async def test_adapter_may_be_sent_in_the_request(
    harness: Harness, scripted: ScriptedEngine, second_engine: ScriptedEngine
) -> None:
    version, settings = (
        await create_trained_version(harness),
        harness.settings.replace({"engine.adapter_delivery": "memory"}),
    )
    await evaluate(harness.db, settings, "test")
    assert (await harness.serving()).id == version.id
    [body], [other_body] = scripted.payloads, second_engine.payloads
    assert body == other_body and body["lora_name"] == "shop-v1"
    tensors = pickle.loads(base64.b64decode(body["serialized_named_tensors"][0]))
    expected = load_file(Path(version.adapter_path or "") / ADAPTER)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert "transfer" in (await harness.get(Version, version.id)).timings
    async with harness.db.write() as session:
        (await session.get_one(Engine, "engine-1")).loaded = []
    second_engine.adapters.clear()
    await sync_adapters(harness.db, settings)
    assert len(second_engine.payloads) == 2 and "shop-v1" in second_engine.adapters


async def test_version_whose_storage_is_away_waits_for_it(
    harness: Harness, scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = await create_trained_version(harness)

    def fail(*args: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as away:
        away.setattr("workers.release.delivery.adapters.check_adapter_files", fail)
        for _ in range(harness.settings.workers.max_attempts + 1):
            await evaluate(harness.db, harness.settings, "test")
            waiting = await harness.get(Version, version.id)
            assert (waiting.state, waiting.attempt, waiting.lease_owner) == (VersionState.TRAINED, 0, None)
    await evaluate(harness.db, harness.settings, "test")
    assert (await harness.serving()).id == version.id


async def test_weights_that_differ_from_the_trainers_never_serve(harness: Harness, scripted: ScriptedEngine) -> None:
    base, version = await harness.serving(), await create_trained_version(harness)
    async with harness.db.write() as session:
        row = await session.get_one(Version, version.id)
        row.probe = {"ids": IDS, "logprobs": [[-0.1] * (len(ids) - 1) for ids in IDS]}
    await evaluate_and_publish(harness)
    rejected = await harness.get(Version, version.id)
    assert rejected.state == VersionState.REJECTED and "differ from the trainer's" in rejected.reason
    assert (await harness.serving()).id == base.id
    assert (await harness.policy()).head_version_id == base.id, "training continues from the serving version"
    assert "version.rejected" in [row.action for row in await harness.all(Audit)]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


async def test_missing_adapter_never_reaches_the_engine(harness: Harness, scripted: ScriptedEngine) -> None:
    """For damaged adapters see test_damaged_exports.py."""
    version = await create_trained_version(harness)
    (Path(version.adapter_path or "") / ADAPTER).unlink()
    await evaluate_and_publish(harness)
    rejected = await harness.get(Version, version.id)
    assert rejected.state == VersionState.REJECTED and "DamagedAdapter" in rejected.reason
    assert scripted.adapters == {} and scripted.requests == []


async def test_version_waits_for_a_ready_engine(harness: Harness) -> None:
    version = await create_trained_version(harness)
    await evaluate_and_publish(harness)
    waiting = await harness.get(Version, version.id)
    assert (waiting.state, waiting.lease_owner) == (VersionState.TRAINED, None)


async def test_version_is_verified_on_all_engines_in_parallel(
    harness: Harness, scripted: ScriptedEngine, second_engine: ScriptedEngine
) -> None:
    version = await create_trained_version(harness)
    await evaluate_and_publish(harness)
    assert (await harness.serving()).id == version.id
    assert [engine.loaded for engine in await harness.all(Engine)] == [["shop-v1"], ["shop-v1"]]
    assert "shop-v1" in scripted.adapters and "shop-v1" in second_engine.adapters


async def test_hanging_engine_delays_nothing_and_gets_no_traffic_for_the_version(
    harness: Harness, scripted: ScriptedEngine, second_engine: ScriptedEngine
) -> None:
    version = await create_trained_version(harness)
    second_engine.hang = True
    async with asyncio.timeout(50):  # the time-out of a load is one minute
        while (await harness.serving()).id != version.id:
            await evaluate_and_publish(harness)
    for number in range(8):
        body = {"model": "shop", "messages": [{"role": "user", "content": f"question {number}"}]}
        assert (await harness.api.post("/v1/chat/completions", json=body)).status_code == 200
    assert {turn.engine for turn in await harness.all(Turn)} == {"engine-0"}
    second_engine.hang = False
    await sync_adapters(harness.db, harness.settings)
    assert [engine.loaded for engine in await harness.all(Engine)] == [["shop-v1"], ["shop-v1"]]


async def test_load_that_hangs_on_one_of_three_engines_is_finished_later(
    harness: Harness, scripted: ScriptedEngine, second_engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    version, third = await create_trained_version(harness), ScriptedEngine(load_hangs=True)

    async def used_engines() -> set[str]:
        await asyncio.sleep(2 * harness.settings.server.route_cache_seconds)
        before = {turn.id for turn in await harness.all(Turn)}
        for number in range(16):
            body = {"model": "shop", "messages": [{"role": "user", "content": f"question {number}"}]}
            answer = await harness.api.post("/v1/chat/completions", json=body)
            assert (answer.status_code, answer.headers["x-policy-version"]) == (200, "shop@v1")
        return {turn.engine for turn in await harness.all(Turn) if turn.id not in before}

    with serve(third) as url:
        async with harness.db.write() as session:
            session.add(Engine(name="engine-2", url=url, state=EngineState.READY, incarnation=1, loaded=[]))
        async with asyncio.timeout(40):  # the time-out of a load is one minute
            await evaluate_and_publish(harness)
        assert (await harness.serving()).id == version.id
        assert await used_engines() == {"engine-0", "engine-1"}
        monkeypatch.setattr(adapter_sync, "MAX_SECONDS_BY_PATH", 0.3)
        monkeypatch.setattr(adapter_sync, "backoff", lambda attempt: 0.0)
        await sync_adapters(harness.db, harness.settings)
        loaded = {engine.name: engine.loaded for engine in await harness.all(Engine)}
        assert loaded == {"engine-0": ["shop-v1"], "engine-1": ["shop-v1"], "engine-2": []}
        third.load_hangs = False
        async with asyncio.timeout(30):
            while (await harness.get(Engine, "engine-2")).loaded != ["shop-v1"]:
                await sync_adapters(harness.db, harness.settings)
        assert await used_engines() == {"engine-0", "engine-1", "engine-2"}


@pytest.mark.parametrize("num_dead", [0, 1, 2])
async def test_version_verified_on_one_engine_is_not_rejected_for_dead_ones(
    harness: Harness, scripted: ScriptedEngine, second_engine: ScriptedEngine, num_dead: int
) -> None:
    """One working engine of three is too few. If no engine works, the attempt does not count."""
    version, third = await create_trained_version(harness), ScriptedEngine()
    with serve(third) as url:
        async with harness.db.write() as session:
            session.add(Engine(name="engine-2", url=url, state=EngineState.READY, incarnation=1, loaded=[]))
        working, dead = (
            (scripted, second_engine, third)[: 2 - num_dead],
            (scripted, second_engine, third)[2 - num_dead :],
        )
        for engine in dead:
            engine.refuse_status = 503
        for _ in range(harness.settings.workers.max_attempts + 2):
            await evaluate_and_publish(harness)
        released: Version = await harness.get(Version, version.id)
        assert released.state == (VersionState.LIVE if len(working) == 2 else VersionState.TRAINED)
        assert released.lease_owner is None
        for engine in dead:
            engine.refuse_status = None
        await evaluate_and_publish(harness)
        assert (await harness.serving()).id == version.id


async def test_one_engine_that_refuses_does_not_outvote_one_that_verifies(
    harness: Harness, scripted: ScriptedEngine, second_engine: ScriptedEngine
) -> None:
    version = await create_trained_version(harness)
    second_engine.load_fails = True
    await evaluate_and_publish(harness)
    assert (await harness.serving()).id == version.id
    scripted.load_fails = True
    other = await create_trained_version(harness, 2)
    await evaluate_and_publish(harness)
    rejected = await harness.get(Version, other.id)
    assert rejected.state == VersionState.REJECTED and "EngineRefused" in (rejected.reason or "")


async def test_unrecorded_adapter_is_unloaded_unless_it_is_wanted(harness: Harness, scripted: ScriptedEngine) -> None:
    version = await create_trained_version(harness)
    await evaluate_and_publish(harness)
    scripted.adapters |= {"shop-v7": "/nowhere", "unknown-v1": "/nowhere"}
    base = await harness.get(Version, version.parent_id)
    await harness.version(VersionState.REJECTED, number=7, adapter_name="shop-v7", parent_id=base.id)
    async with harness.db.write() as session:
        (await session.get_one(Engine, "engine-0")).loaded = []
    await unload_unused_adapters(harness.db, harness.settings)
    assert set(scripted.adapters) == {"shop-v1", "unknown-v1"}


async def test_serving_version_that_no_engine_holds_is_503_and_gets_loaded(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    await create_trained_version(harness)
    await evaluate_and_publish(harness)
    scripted.adapters.clear()
    async with harness.db.write() as session:
        (await session.get_one(Engine, "engine-0")).loaded = []
    body = {"model": "shop", "messages": [{"role": "user", "content": "hi"}]}
    await asyncio.sleep(2 * harness.settings.server.route_cache_seconds)
    assert (await harness.api.post("/v1/chat/completions", json=body)).status_code == 503
    await sync_adapters(harness.db, harness.settings)
    await asyncio.sleep(2 * harness.settings.server.route_cache_seconds)
    assert (await harness.api.post("/v1/chat/completions", json=body)).headers["x-policy-version"] == "shop@v1"


async def set_head(harness: Harness, version: Version) -> None:
    """Make the version the head of its policy."""
    policy = await harness.policy()
    async with harness.db.write() as session:
        (await session.get_one(Policy, policy.id)).head_version_id = version.id


@pytest.mark.parametrize("verified", [False, True])
async def test_rollback_during_evaluation_rejects_the_version(
    harness: Harness, scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, verified: bool
) -> None:
    """The rollback happens during the verification, or after it while the version waits to be published."""
    base, version = await harness.serving(), await create_trained_version(harness)
    if verified:
        async with harness.db.write() as session:
            (await session.get_one(Version, version.id)).state = VersionState.VERIFIED
        await set_head(harness, base)
        await publish(harness.db, harness.settings)
    else:

        async def verify_meanwhile(*arguments: Any) -> DeliveryResult:
            outcome = await verify_on_engines(*arguments)
            await set_head(harness, base)
            return outcome

        monkeypatch.setattr("workers.release.delivery.adapters.verify_on_engines", verify_meanwhile)
        await evaluate(harness.db, harness.settings, "test")
    assert (await harness.serving()).id == base.id
    rejected: Version = await harness.get(Version, version.id)
    assert rejected.state == VersionState.REJECTED and "training returned" in (rejected.reason or "")


async def test_version_lost_before_publishing_is_verified_again(harness: Harness, scripted: ScriptedEngine) -> None:
    """An engine restarted without the version before the version was published."""
    version = await create_trained_version(harness)
    async with harness.db.write() as session:
        (await session.get_one(Version, version.id)).state = VersionState.VERIFIED
    await publish(harness.db, harness.settings)
    assert (await harness.get(Version, version.id)).state == VersionState.TRAINED
    await evaluate_and_publish(harness)
    assert (await harness.serving()).id == version.id


async def test_old_versions_are_unloaded_and_rollback_targets_stay_loaded(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    settings = harness.settings.replace({"release.keep_versions": 2})
    for number in range(1, 6):
        await create_trained_version(harness, number)
        await evaluate_and_publish(harness)
    await unload_unused_adapters(harness.db, settings)
    assert set(scripted.adapters) == {"shop-v4", "shop-v5"}
    assert (await harness.all(Engine))[0].loaded == ["shop-v4", "shop-v5"]
    answer = await harness.api.post("/v1/policies/shop/rollback", json={})
    assert answer.json()["serving"] == "shop@v4"


async def test_version_beyond_the_kl_guard_is_rejected_and_training_becomes_synchronous(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    base = await harness.serving()
    far = await create_trained_version(harness, 1)
    async with harness.db.write() as session:
        (await session.get_one(Version, far.id)).metrics = {"guard/kl": 0.051}
    await evaluate_and_publish(harness)
    rejected, policy = await harness.get(Version, far.id), await harness.policy()
    assert rejected.state == VersionState.REJECTED and "0.051 per token" in rejected.reason
    assert (await harness.serving()).id == base.id == policy.head_version_id, (
        "training continues from the serving version"
    )
    assert (policy.mode, policy.kl_alarms) == (LearningMode.SYNCHRONOUS, 1)
    assert scripted.adapters == {}, "nothing was loaded on the engine"
    near = await harness.version(
        number=2, adapter_name="shop-v2", metrics={"guard/kl": 0.001}, **export_values(harness, "shop-v2", 2)
    )
    await evaluate_and_publish(harness)
    policy = await harness.policy()
    assert (await harness.serving()).id == near.id
    assert (policy.mode, policy.kl_alarms) == (LearningMode.ASYNCHRONOUS, 0)
    actions = [row.action for row in await harness.all(Audit) if row.actor == "guard"]
    assert actions == ["training.synchronous", "training.asynchronous"]


async def test_repeated_kl_alarms_halt_training_until_it_is_resumed(harness: Harness, scripted: ScriptedEngine) -> None:
    for number in range(1, 4):
        version = await harness.version(number=number, adapter_name=f"shop-v{number}", metrics={"guard/kl": 0.5})
        await evaluate_and_publish(harness)
        assert (await harness.get(Version, version.id)).state == VersionState.REJECTED
    policy = await harness.policy()
    assert (policy.mode, policy.kl_alarms) == (LearningMode.HALTED, 3)
    tried = ", ".join(f"{harness.settings.trainer.update_kl_target / 2**number:.3g}" for number in range(3))
    assert f"3 alarms in a row: smaller updates did not help (KL targets {tried} per token)" in str(policy.mode_reason)
    async with harness.db.write() as session:
        kl_guard.resume(await lock_policy(session, policy.id), actor="sk-test", reason="looked at it")
    policy = await harness.policy()
    assert (policy.mode, policy.kl_alarms) == (LearningMode.ASYNCHRONOUS, 0)
    assert [row.actor for row in await harness.all(Audit) if row.action == "training.asynchronous"] == ["sk-test"]
