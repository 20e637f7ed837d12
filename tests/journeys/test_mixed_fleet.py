"""One SGLang and one vLLM serve a policy: both answer, both verify each version, and both follow a rollback."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import httpx2
import pytest

from alignment.artifacts.manifest import write_manifest
from app.core.database import Database
from app.core.migrate import upgrade
from app.core.settings import Settings
from app.inference.keys import EngineKeys
from app.inference.pool import EnginePool
from app.models import Engine, EngineState, Turn, TurnState, Version
from demo.recompute_logprobs import check_logprobs
from demo.simulate import SimulatedUsers, UserBehavior
from tests.journeys.deployments import create_deployment, engine_keys
from tests.support.deployment import Harness
from tests.support.engine_adapters import ReferenceWeights
from tests.support.engine_fixture import RunningEngine
from tests.support.processes import PATIENCE_SECONDS, processes, until
from workers.release.delivery.adapters import verify_on_engines
from workers.release.verify_delivery import NotDelivered, Timings

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]
RELEASES = 2
IDS = [list(range(5, 60)), [7, 300, 12, 9]]


@pytest.fixture
async def deployment(tmp_path: Path, engine: RunningEngine, vllm_engine: RunningEngine) -> AsyncIterator[Harness]:
    settings = Settings(
        home=tmp_path / "home",
        policy="shop",
        trainer={"batch_size": 32, "max_batch_size": 32, "optim": {"lr": 2e-3}, "kl_guard": 0.1},
        **engine_keys(engine),
    )
    settings.home.mkdir()
    await asyncio.to_thread(upgrade, settings.database_url)
    db = Database(settings.database_url)
    harness = await create_deployment(engine, settings, db)
    url, kind = vllm_engine.spec.url, vllm_engine.spec.kind
    async with db.write() as session:
        session.add(Engine(name="engine-1", url=url, kind=kind, state=EngineState.READY, incarnation=1, loaded=[]))
    yield harness
    await db.close()


@pytest.mark.journey
async def test_both_kinds_serve_verify_and_roll_back(
    deployment: Harness, engine: RunningEngine, vllm_engine: RunningEngine
) -> None:
    async def are_released() -> bool:
        return sum(version.live_at is not None for version in await deployment.all(Version)) > RELEASES  # with v0

    with processes(deployment.settings) as running:
        running.start("trainer", "worker", "publisher", "beat", "api")
        users = SimulatedUsers(running.settings, UserBehavior(users=12, seed=5))
        chatting = asyncio.create_task(users.run())
        try:
            await until(are_released, 600, f"{RELEASES} versions are released")
        finally:
            users.stop()
            await chatting
        stats = users.stats
        assert stats.errors == [] and (stats.refused, stats.incomplete, stats.mislabelled) == (0, 0, 0)
        await check_rollback(deployment, running.settings.local_url, (engine, vllm_engine))
    turns = [turn for turn in await deployment.all(Turn) if turn.state == TurnState.DONE]
    assert set(Counter(turn.engine for turn in turns)) == {"engine-0", "engine-1"}
    logprobs = await check_logprobs(deployment.db, deployment.settings)
    assert logprobs.replies > 64 and not logprobs.mislabelled, logprobs


async def check_rollback(deployment: Harness, url: str, engines: tuple[RunningEngine, ...]) -> None:
    live = await deployment.serving()
    parent: Version = await deployment.get(Version, live.parent_id)

    async def held() -> list[set[str]]:
        names = []
        for engine in engines:
            async with aclosing(engine.connect()) as client:
                names.append(await client.list_adapters())
        return names

    async def is_on_both() -> bool:
        return all(live.adapter_name in names for names in await held())

    await until(is_on_both, PATIENCE_SECONDS, "both engines hold the version that serves")
    headers = {"authorization": f"Bearer {deployment.key}"}
    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=60) as api:
        answer = await api.post("/v1/policies/shop/rollback", json={"reason": "a test"})
        assert answer.status_code == 200, answer.text
        versions = set()
        for number in range(8):  # conversations are spread over both engines
            messages = [{"role": "user", "content": f"When are you open on day {number}?"}]
            reply = await api.post("/v1/chat/completions", json={"model": "shop", "messages": messages})
            versions.add(reply.headers["x-policy-version"])
    assert versions == {f"shop@v{parent.number}"}


async def test_engine_that_computes_something_else_is_refused_with_the_reason(
    deployment: Harness, engine: RunningEngine, vllm_engine: RunningEngine, tmp_path: Path
) -> None:
    """vLLM holds other weights under the version's name."""
    weights = ReferenceWeights(Path(engine.spec.model), tmp_path)
    path = weights.adapter("mixed-v1", seed=21)
    sha256 = write_manifest(path, {})
    probe = {"ids": IDS, "logprobs": [weights.logprobs("mixed-v1", ids).tolist() for ids in IDS]}
    version = await deployment.version(
        adapter_name="mixed-v1", adapter_path=str(path), manifest_sha256=sha256, probe=probe
    )
    async with aclosing(vllm_engine.connect()) as client:
        await client.load_adapter("mixed-v1", weights.adapter("mixed-other", seed=22))
    keys = EngineKeys(engine.spec.api_key, engine.spec.admin_key)
    rows = sorted(await deployment.all(Engine), key=lambda row: row.name)
    async with EnginePool(keys) as pool:
        result = await verify_on_engines(pool, rows, version, deployment.settings, Timings())
    assert [row.kind for row in result.verified_engines] == ["sglang"]
    [error] = result.errors
    assert isinstance(error, NotDelivered) and "differ from the trainer's" in str(error)
