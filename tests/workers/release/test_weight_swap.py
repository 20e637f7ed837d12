"""Release full weights: an engine holds one version at a time, and no request is rejected."""

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import pytest

from alignment.artifacts.specs import WEIGHTS
from alignment.release.gates import PromptsGate
from app.core import leases
from app.core.settings import Settings
from app.inference.transport import EngineUnavailable
from app.models import Audit, Deployment, Engine, EngineState, Turn, TurnState, Version, VersionState
from tests.support.deployment import Harness
from tests.support.engine_model import make_tiny_model
from tests.support.full_weights import make_weights
from tests.support.scripted_engine import ScriptedEngine, logprob
from tests.support.settings import by_path
from workers.engine.engine_record import DatabaseEngineRecord
from workers.engine.version_files import WeightsRef
from workers.reconcile import reconcile
from workers.release import weight_swap
from workers.release.delivery.full_weights import FullWeightsDelivery
from workers.release.evaluate import evaluate
from workers.release.publish import publish

IDS = [[5, 6, 7, 8], [9, 10]]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def settings(settings: Settings, tiny: Path) -> Settings:
    values = {"adaptation": "full", "model": str(tiny), "drain_seconds": 30.0, "weight_swap_wait_seconds": 60.0}
    return settings.replace(by_path(values))


async def create_trained_version(harness: Harness, number: int = 1) -> Version:
    """Create a version as the trainer does, with the log-probs that the engine should compute."""
    name = f"shop-v{number}"
    path = harness.settings.versions_dir / name
    logprobs = [[logprob(name, ids[:at], ids[at]) for at in range(1, len(ids))] for ids in IDS]
    return await harness.version(
        full_weights=True,
        adapter_path=str(path),
        manifest_sha256=make_weights(path, Path(harness.settings.model), seed=number),
        probe={"ids": IDS, "logprobs": logprobs},
    )


async def evaluate_and_publish(harness: Harness, settings: Settings | None = None) -> None:
    """Evaluate and publish repeatedly, as the reconciler would: on a loaded machine an engine may seem unreachable."""
    async with asyncio.timeout(60):
        while {VersionState.TRAINED, VersionState.VERIFIED} & {version.state for version in await harness.all(Version)}:
            await evaluate(harness.db, settings or harness.settings, "test")
            await publish(harness.db, harness.settings)


async def sync_weights(harness: Harness) -> None:
    """Swap weights until every engine holds the serving version."""
    async with asyncio.timeout(60):
        while True:
            await evaluate(harness.db, harness.settings, "test")
            async with harness.db.read() as session:
                if not await FullWeightsDelivery().has_outdated_engine(session):
                    return


async def chat(harness: Harness, text: str = "hi", **fields: Any) -> httpx2.Response:
    body = {"model": "shop", "messages": [{"role": "user", "content": text}], **fields}
    return await harness.api.post("/v1/chat/completions", json=body)


async def engine_states(harness: Harness) -> list[tuple[str | None, bool]]:
    engines = sorted(await harness.all(Engine), key=lambda engine: engine.name)
    return [(engine.weights, engine.swapping_until is not None) for engine in engines]


async def test_weights_are_swapped_verified_and_then_live(harness: Harness, scripted: ScriptedEngine) -> None:
    assert (await chat(harness)).headers["x-policy-version"] == "shop@v0"
    version = await create_trained_version(harness)
    await evaluate_and_publish(harness)
    released: Version = await harness.get(Version, version.id)
    assert (released.state, (await harness.serving()).id) == (VersionState.LIVE, version.id)
    assert scripted.weight_events == ["pause retract", "shop-v1", "continue"]
    assert await engine_states(harness) == [("shop-v1", False)]
    assert {"check", "drain", "load", "verify", "exchange", "switch", "trained_to_served"} <= released.timings.keys()
    reply = await chat(harness)
    request = scripted.requests[-1]
    assert reply.headers["x-policy-version"] == "shop@v1"
    assert "lora_path" not in request and request["extra_key"] == "shop-v1"
    turn = max(await harness.all(Turn), key=lambda turn: turn.created_at)
    assert (turn.exclusion_reason, [span["version"] for span in turn.weight_versions]) == (None, ["shop-v1"])


@pytest.mark.parametrize("fault", ["failed_updates", "corrupted_updates"])
async def test_weights_that_differ_from_the_trainers_are_restored_before_any_chat(
    harness: Harness, scripted: ScriptedEngine, fault: str
) -> None:
    first = await create_trained_version(harness)
    await evaluate_and_publish(harness)
    bad = await create_trained_version(harness, 2)
    getattr(scripted, fault).add("shop-v2")
    requests = [asyncio.create_task(chat(harness, f"question {number}")) for number in range(4)]
    await evaluate_and_publish(harness)
    rejected = await harness.get(Version, bad.id)
    assert rejected.state == VersionState.REJECTED and rejected.reason is not None
    assert (await harness.serving()).id == first.id and (await harness.policy()).head_version_id == first.id
    assert scripted.weights == "shop-v1" and not scripted.paused
    assert await engine_states(harness) == [("shop-v1", False)]
    replies = [*await asyncio.gather(*requests), await chat(harness)]
    assert {reply.headers["x-policy-version"] for reply in replies} == {"shop@v1"}
    turns = await harness.all(Turn)
    assert {span["version"] for turn in turns for span in turn.weight_versions} == {"shop-v1"}


async def test_ready_engines_hold_the_serving_version_or_swap_to_it(harness: Harness, scripted: ScriptedEngine) -> None:
    async def ready() -> int:
        return (await harness.api.get("/readyz")).status_code

    async def set_engine(**values: Any) -> None:
        async with harness.db.write() as session:
            for name, value in values.items():
                setattr(await session.get_one(Engine, "engine-0"), name, value)

    version = await create_trained_version(harness)
    await evaluate_and_publish(harness)
    assert await ready() == 200
    await set_engine(weights=None)  # the deployment has just changed, and the engine follows
    assert await ready() == 200
    async with harness.db.write() as session:
        deployment = await session.get_one(Deployment, version.policy_id)
        deployment.changed_at = (deployment.changed_at or 0.0) - 3600.0
    assert await ready() == 503  # the swap is overdue
    await set_engine(swapping_until=1e12)
    assert await ready() == 200
    await set_engine(swapping_until=0.0)  # the swap was abandoned
    assert await ready() == 503
    next_version = await create_trained_version(harness, 2)
    await set_engine(swapping_until=None, weights=next_version.adapter_name)
    assert await ready() == 503  # the loaded version is not being verified
    async with harness.db.write() as session:
        fence = await leases.claim(
            session, Version, next_version.id, owner="test", seconds=60.0, states=(VersionState.TRAINED,)
        )
    assert fence is not None and await ready() == 200


async def test_gates_without_prompts_run_before_the_swap(harness: Harness, scripted: ScriptedEngine) -> None:
    version = await create_trained_version(harness)
    gate = {"type": "metric", "name": "entropy", "metric": "actor/entropy", "at_least": 0.1}
    settings = harness.settings.replace({"release.gates": [gate]})
    await evaluate_and_publish(harness, settings)
    rejected: Version = await harness.get(Version, version.id)
    assert rejected.state == VersionState.REJECTED and (rejected.reason or "").startswith("gate entropy")
    assert scripted.weight_events == []


async def test_gate_that_cannot_run_restores_the_weights_and_rejects_the_version(
    harness: Harness, scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse_prompts(gates: Any, client: Any, kinds: Any) -> None:
        if kinds == (PromptsGate,):
            raise EngineUnavailable("no reply to a prompt")

    version = await create_trained_version(harness)
    monkeypatch.setattr("workers.release.evaluate.GateRunner.first_refusal", refuse_prompts)
    await evaluate_and_publish(harness)
    rejected: Version = await harness.get(Version, version.id)
    assert rejected.state == VersionState.REJECTED and "its gates could not be reached" in (rejected.reason or "")
    assert (
        scripted.weight_events.count("shop-v1") == harness.settings.workers.max_attempts
        and scripted.weights == "default"
    )


async def test_previous_version_is_not_waited_for(harness: Harness, scripted: ScriptedEngine) -> None:
    await create_trained_version(harness)
    await evaluate_and_publish(harness)
    assert (await chat(harness, model="shop@previous")).status_code == 404


async def test_damaged_files_are_not_loaded(harness: Harness, scripted: ScriptedEngine) -> None:
    version = await create_trained_version(harness)
    path = Path(version.adapter_path or "") / WEIGHTS
    path.write_bytes(path.read_bytes()[:-1])
    await evaluate_and_publish(harness)
    rejected = await harness.get(Version, version.id)
    assert rejected.state == VersionState.REJECTED and "DamagedAdapter" in (rejected.reason or "")
    assert scripted.weight_events == []


async def test_requests_wait_during_a_swap_and_name_the_answering_version(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    """All requests are answered, streamed or not, each by the version that the reply names."""
    scripted.seconds_per_token = 0.002
    is_over = asyncio.Event()
    replies: list[httpx2.Response] = []

    async def user(number: int) -> None:
        while not is_over.is_set():
            replies.append(await chat(harness, f"user {number}", stream=bool(number % 2)))

    users = [asyncio.create_task(user(number)) for number in range(4)]
    for number in (1, 2, 3):
        version = await create_trained_version(harness, number)
        await evaluate_and_publish(harness)
        assert (await harness.serving()).id == version.id
    is_over.set()
    await asyncio.gather(*users)
    assert {reply.status_code for reply in replies} == {200}
    versions = {row.id: row.adapter_name for row in await harness.all(Version)}
    for turn in await harness.all(Turn):
        versions_used = {span["version"] for span in turn.weight_versions or ()}
        assert (turn.state, turn.exclusion_reason) == (TurnState.DONE, None)
        assert turn.stream or versions_used == {versions[turn.version_id] or "default"}


async def test_reply_that_outlasts_the_drain_continues_and_is_excluded(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    scripted.reply_text, scripted.seconds_per_token = "word " * 500, 0.05
    requests = [asyncio.create_task(chat(harness, stream=stream)) for stream in (False, True)]
    while len(scripted.running) < 2:
        await asyncio.sleep(0.01)
    short_drain = harness.settings.replace({"engine.drain_seconds": 0.1})
    await create_trained_version(harness)
    await evaluate_and_publish(harness, short_drain)
    assert len(scripted.running) == 2, "the swap did not wait for them"
    scripted.seconds_per_token = 0.0
    assert [reply.status_code for reply in await asyncio.gather(*requests)] == [200, 200]
    turns = {turn.stream: turn for turn in await harness.all(Turn)}
    for turn in turns.values():
        assert turn.exclusion_reason == "the weights changed during the reply, from default to shop-v1"
    spans = turns[False].weight_versions
    assert [span["version"] for span in spans or ()] == ["default", "shop-v1"]
    assert spans[0]["end"] == spans[1]["start"] > 0 and spans[1]["end"] == len(turns[False].output_ids)
    assert turns[True].weight_versions is None, "the engine reports no weight versions for streams"


async def test_two_engines_are_swapped_one_after_the_other(
    harness: Harness, scripted: ScriptedEngine, second_engine: ScriptedEngine
) -> None:
    version = await create_trained_version(harness)
    scripted.update_hangs = True
    next_version = asyncio.create_task(evaluate_and_publish(harness))
    while not scripted.paused:
        await asyncio.sleep(0.01)
    before = [await chat(harness, f"question {number}") for number in range(6)]
    assert {reply.headers["x-policy-version"] for reply in before} == {"shop@v0"}
    scripted.update_hangs = False
    await next_version
    assert (await harness.serving()).id == version.id
    assert await engine_states(harness) == [("shop-v1", False), (None, False)]
    await asyncio.sleep(2 * harness.settings.server.route_cache_seconds)
    after = [await chat(harness, f"question {number}") for number in range(6)]
    assert {reply.headers["x-policy-version"] for reply in after} == {"shop@v1"}
    turns = sorted(await harness.all(Turn), key=lambda turn: turn.created_at)
    assert [turn.engine for turn in turns] == 6 * ["engine-1"] + 6 * ["engine-0"]
    await sync_weights(harness)
    assert await engine_states(harness) == [("shop-v1", False), ("shop-v1", False)]
    assert scripted.weight_events == second_engine.weight_events == ["pause retract", "shop-v1", "continue"]


async def test_rollback_takes_effect_immediately_and_requests_wait_for_the_engine(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    """Roll back to the base model, whose probe was recorded when its weights were replaced."""
    base = await harness.serving()
    await create_trained_version(harness)
    await evaluate_and_publish(harness)
    assert (await harness.get(Version, base.id)).probe is not None
    answer = await harness.api.post("/v1/policies/shop/rollback", json={})
    assert answer.json()["serving"] == "shop@v0"
    requests = asyncio.create_task(chat(harness))
    done, _ = await asyncio.wait([requests], timeout=0.3)
    assert not done, "the engine still has other weights"
    await sync_weights(harness)
    assert (await requests).headers["x-policy-version"] == "shop@v0"
    assert scripted.weights == "default" and await engine_states(harness) == [(None, False)]
    deployed = await harness.api.post("/v1/policies/shop/deploy", json={"version": 1})
    assert deployed.json()["serving"] == "shop@v1"
    await reconcile(harness.db, harness.settings)
    await sync_weights(harness)
    assert scripted.weights == "shop-v1"


async def test_abandoned_swap_is_repaired(harness: Harness, scripted: ScriptedEngine) -> None:
    """The worker died while the engine was paused, with weights other than the recorded ones."""
    version = await create_trained_version(harness)
    await evaluate_and_publish(harness)
    assert (await harness.serving()).id == version.id
    scripted.paused, scripted.weights = True, "nothing"
    async with harness.db.write() as session:
        engine = await session.get_one(Engine, "engine-0")
        engine.swapping_until = 1.0
    requests = asyncio.create_task(chat(harness))
    await sync_weights(harness)
    assert scripted.weights == "shop-v1" and not scripted.paused
    assert (await requests).headers["x-policy-version"] == "shop@v1"
    assert await engine_states(harness) == [("shop-v1", False)]


async def test_engine_is_held_by_one_swap_at_a_time(harness: Harness, scripted: ScriptedEngine) -> None:
    await create_trained_version(harness)
    await evaluate_and_publish(harness)
    await harness.api.post("/v1/policies/shop/rollback", json={})
    await asyncio.gather(*(FullWeightsDelivery().sync(harness.db, harness.settings) for _ in range(3)))
    assert scripted.weight_events == ["pause retract", "shop-v1", "continue", "pause retract", "default", "continue"]


async def test_restarted_engine_is_ready_when_it_holds_the_serving_version(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    version = await create_trained_version(harness)
    await evaluate_and_publish(harness)
    record = DatabaseEngineRecord(harness.db, harness.settings, "http://127.0.0.1:9")
    incarnation = await record.record_start()
    assert await engine_states(harness) == [(None, False)]
    [version_ref] = await record.read_wanted_versions()
    assert version_ref == WeightsRef("shop-v1", Path(version.adapter_path or ""), version.manifest_sha256 or "")
    assert not await record.try_mark_ready(incarnation, [], {"shop-v1": "it is damaged"})
    assert await record.try_mark_ready(incarnation, ["shop-v1"], {})
    assert await engine_states(harness) == [("shop-v1", False)]
    assert (await harness.all(Engine))[0].state == EngineState.READY


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "deploy", {"version": 0, "share": 0.1}),
        ("PUT", "delivery", {"conversations": "sticky"}),
        ("PUT", "delivery", {"canary": {"share": 0.1}}),
        ("PUT", "delivery", {"shadow": {"min_rated": 0}}),
        ("PUT", "pins", {"kind": "user", "subject": "anna", "version": 0}),
    ],
)
async def test_features_that_need_two_versions_are_refused_with_409(
    harness: Harness, method: str, path: str, body: dict[str, Any]
) -> None:
    answer = await harness.api.request(method, f"/v1/policies/shop/{path}", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "full_weights")
    assert "an engine holds one version" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "overrides",
    [
        {"canary": {"share": 0.1}},
        {"shadow": {"share": 0.1}},
        {
            "gates": [
                {"type": "prompts", "name": "g", "dataset": "d", "verifier": {"type": "contains"}, "max_drop": 0.1}
            ]
        },
    ],
)
def test_settings_that_compare_two_versions_are_refused_at_startup(overrides: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="an engine holds one version"):
        Settings(trainer={"adaptation": "full"}, release=overrides)


async def test_audit_records_a_rejected_version(harness: Harness, scripted: ScriptedEngine) -> None:
    await create_trained_version(harness)
    scripted.corrupted_updates.add("shop-v1")
    await evaluate_and_publish(harness)
    assert "version.rejected" in [row.action for row in await harness.all(Audit)]


async def test_renewal_that_waited_for_the_end_of_a_swap_does_nothing(
    harness: Harness, scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = weight_swap.SwapLease._write

    async def write_slowly(lease: weight_swap.SwapLease, *arguments: Any, **values: Any) -> bool:
        await asyncio.sleep(0.1)
        return await write(lease, *arguments, **values)

    monkeypatch.setattr(weight_swap.SwapLease, "_write", write_slowly)
    async with weight_swap.SwapLease(harness.db, await harness.get(Engine, "engine-0"), seconds=0.1) as lease:
        await lease.finish("shop-v1")
    engine: Engine = await harness.get(Engine, "engine-0")
    assert (engine.swapping_until, engine.weights) == (None, "shop-v1")
