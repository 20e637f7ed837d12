"""A deployment is backed up while people chat and vote, and its copy serves the same version on the real engine."""

import asyncio
import shutil
from pathlib import Path

import httpx2
import pytest

from app.core.database import Database
from app.core.settings import Settings
from app.models import Engine, EngineState, Turn
from app.ops import backup
from demo.recompute_logprobs import check_logprobs
from demo.simulate import SimulatedUsers, UserBehavior
from tests.journeys.deployments import create_deployment, engine_keys
from tests.support.backups import empty_home, ignore_progress
from tests.support.deployment import Harness
from tests.support.engine_fixture import RunningEngine
from tests.support.processes import PATIENCE_SECONDS, processes, until


@pytest.mark.engine
@pytest.mark.journey
@pytest.mark.slow
async def test_restored_deployment_serves_the_same_version(
    database_url: str, tmp_path: Path, engine: RunningEngine
) -> None:
    home = tmp_path / "home"
    home.mkdir(exist_ok=True)
    settings = Settings(
        home=home,
        database={"url": database_url},
        policy="shop",
        trainer={"batch_size": 32, "kl_guard": 1.0},
        **engine_keys(engine),
    )
    async with Database(database_url) as db:
        deployment = await create_deployment(engine, settings, db)
        await back_up_during_use(deployment, tmp_path / "backup")
        version, num_turns = await deployment.serving(), len(await deployment.all(Turn))
        loaded = (await deployment.get(Engine, "engine-0")).loaded
    client = engine.connect()
    for name in loaded:
        await client.unload_adapter(name)
    await client.aclose()
    shutil.rmtree(settings.versions_dir)  # the copy must not depend on the original's files
    with empty_home(settings, tmp_path / "other") as restored:
        manifest = await asyncio.to_thread(backup.restore_backup, restored, tmp_path / "backup", ignore_progress)
        assert 0 < manifest.contents.rows["turns"] <= num_turns
        async with Database(restored.database_url) as db:
            copy = Harness(settings=restored, db=db, key=deployment.key)
            assert (await copy.serving()).number <= version.number
            await check_copy_serves(copy, engine)


async def back_up_during_use(deployment: Harness, folder: Path) -> None:
    async def has_learned() -> bool:
        return (await deployment.serving()).number >= 1

    with processes(deployment.settings) as running:
        running.start("trainer", "worker", "publisher", "beat", "api")
        users = SimulatedUsers(running.settings, UserBehavior(users=8, seed=5))
        chatting = asyncio.create_task(users.run())
        try:
            await until(has_learned, PATIENCE_SECONDS, "a version is live")
            await asyncio.to_thread(backup.create_backup, deployment.settings, folder, ignore_progress)
        finally:
            users.stop()
            await chatting
    stats = users.stats
    assert (stats.errors, stats.refused, stats.incomplete, stats.mislabelled) == ([], 0, 0, 0)
    assert backup.verify_backup(folder, ignore_progress)[1] == []


async def check_copy_serves(copy: Harness, engine: RunningEngine) -> None:
    """Check that the reconciler loads and verifies the serving version from the copy's files, and that it answers."""
    serving = await copy.serving()
    assert serving.adapter_name is not None
    async with copy.db.write() as session:  # as the supervisor of a new engine does
        row = await session.get_one(Engine, "engine-0")
        assert (row.state, row.loaded) == (EngineState.DOWN, [])
        row.state, row.url = EngineState.READY, engine.spec.url

    async def is_loaded() -> bool:
        return serving.adapter_name in (await copy.get(Engine, "engine-0")).loaded

    with processes(copy.settings) as running:
        running.start("worker", "beat", "api")
        await until(is_loaded, PATIENCE_SECONDS, "the engine has verified the restored version")
        headers = {"authorization": f"Bearer {copy.key}"}
        body = {"model": "shop", "messages": [{"role": "user", "content": "When do you open?"}]}
        async with httpx2.AsyncClient(base_url=running.settings.local_url, headers=headers, timeout=60) as api:
            answer = await api.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-policy-version"] == f"shop@v{serving.number}"
    logprobs = await check_logprobs(copy.db, copy.settings)
    assert logprobs.replies > 0 and logprobs.mislabelled == 0, logprobs
