"""The training loop with full weights: people chat and rate, each version replaces the engine's weights, the engine
dies, a rollback follows; no reply is refused, cut, or answered by weights that it does not name."""

import asyncio
from pathlib import Path

import httpx2
import psutil
import pytest

from app.cli.client import save_api_key
from app.core.database import Database
from app.core.migrate import upgrade
from app.core.settings import Settings
from app.models import Engine, EngineState, Version, VersionState
from app.projects.bootstrap import bootstrap
from demo.recompute_logprobs import check_logprobs
from demo.simulate import SimulatedUsers, UserBehavior
from tests.support.deployment import Harness
from tests.support.engine_fixture import free_port, require_engine_environment
from tests.support.processes import Processes, processes, until

UPDATES = 2


@pytest.fixture
async def small(tmp_path: Path) -> Harness:
    require_engine_environment()
    settings = Settings(
        home=tmp_path / "home",
        policy="shop",
        adaptation="full",
        batch_size=48,
        learning_rate=2e-4,
        kl_guard=1.0,  # each update is to come home
        engine_port=free_port(),
    )
    settings.home.mkdir()
    await asyncio.to_thread(upgrade, settings.database)
    db = Database(settings.database)
    async with db.write() as session:
        key = await bootstrap(session, settings.policy, settings.model, settings.adaptation)
    assert key is not None
    save_api_key(settings, key)
    return Harness(settings=settings, db=db, key=key)


@pytest.mark.engine
@pytest.mark.journey
@pytest.mark.timeout(1200)
@pytest.mark.slow
async def test_training_loop_with_full_weights(small: Harness) -> None:
    async def ready() -> bool:
        return any(engine.state == EngineState.READY for engine in await small.all(Engine))

    async def live() -> bool:
        return (await small.serving()).number >= UPDATES

    with processes(small.settings) as running:
        running.start("engine", "trainer", "worker", "publisher", "beat", "api")
        await until(ready, 240, "the engine is ready")
        crowd = SimulatedUsers(running.settings, UserBehavior(users=8, seed=5))
        chatting = asyncio.create_task(crowd.run())
        try:
            await until(live, 400, f"{UPDATES} versions are live")
        finally:
            crowd.stop()
            await chatting
        assert crowd.stats.errors == []
        assert (crowd.stats.refused, crowd.stats.incomplete, crowd.stats.mislabelled) == (0, 0, 0)
        await settled(small)
        await check_restart(small, running)
        await check_rollback(small, running.settings.url)
    for version in await small.all(Version):
        assert version.number == 0 or (version.full_weights and version.state != VersionState.REJECTED), version.reason
    attested = await check_logprobs(small.db, small.settings)
    assert attested.replies > 60 and attested.mislabelled == 0, attested
    await small.db.close()


async def settled(small: Harness) -> None:
    """What is being trained has come home; nobody chats any more."""

    async def home() -> bool:
        [engine] = await small.all(Engine)
        states = {version.state for version in await small.all(Version)}
        on_their_way = states & {VersionState.TRAINED, VersionState.VERIFIED}
        return not on_their_way and engine.swapping_until is None and engine.weights == (await small.serving()).weights

    await asyncio.sleep(3)
    await until(home, 120, "nothing is under way")


async def check_restart(small: Harness, running: Processes) -> None:
    """Killed, it comes back with what serves, and not with the weights that it starts with."""
    [before] = await small.all(Engine)
    process = running.children["engine"].process
    assert process is not None
    for child in psutil.Process(process.pid).children():
        child.kill()

    async def back() -> bool:
        [engine] = await small.all(Engine)
        return engine.state == EngineState.READY and engine.incarnation > before.incarnation

    await until(back, 240, "the engine is back")
    assert (await small.all(Engine))[0].weights == (await small.serving()).weights
    reply = await chat(small, running.settings.url)
    assert reply.headers["x-policy-version"] == f"shop@v{(await small.serving()).number}"


async def check_rollback(small: Harness, url: str) -> None:
    """To the base model: the pointer moves with the call, and the next reply waits for the engine."""
    headers = {"authorization": f"Bearer {small.key}"}
    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=60) as api:
        answer = await api.post("/v1/policies/shop/rollback", json={"version": 0})
        assert answer.status_code == 200, answer.text
    reply = await chat(small, url)
    assert reply.headers["x-policy-version"] == answer.json()["serving"] == "shop@v0"
    [engine] = await small.all(Engine)
    assert engine.weights is None


async def chat(small: Harness, url: str) -> httpx2.Response:
    body = {"model": "shop", "messages": [{"role": "user", "content": "When are you open?"}], "max_tokens": 40}
    headers = {"authorization": f"Bearer {small.key}"}
    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=90) as api:
        reply = await api.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply
