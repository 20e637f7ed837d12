"""The ring that canaries are measured on: one engine, the API, the workers; the trainer only when it is asked for."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sqlalchemy import func, select

from alignment.release.canary import CanaryConfig
from alignment.trainer.checkpoint import STATE
from app.cli.client import Api, save_api_key
from app.core.database import Database
from app.core.jobs import TaskSender, make_celery
from app.core.migrate import upgrade
from app.core.settings import Settings
from app.models import Deployment, Engine, EngineState, Policy, Sample, Version, VersionState
from app.projects.bootstrap import bootstrap
from tests.benchmarks.deployment import POLICY, database
from tests.benchmarks.swap_versions import Made, publish
from tests.support.engine_fixture import free_port
from tests.support.processes import Processes, processes, until

HOME_SECONDS = 60.0  # the most that a version takes to come home
LEARNED_SECONDS = 300.0  # likewise an update of the trainer, its start included
PATH = f"/v1/policies/{POLICY}"


@dataclass
class Harness:
    settings: Settings
    db: Database
    policy_id: str
    running: Processes
    api: Api
    stable: int = 0  # the number of the version that everything is compared with

    async def post(self, path: str, **body: Any) -> Any:
        return await asyncio.to_thread(self.api.post, f"{PATH}/{path}", body)

    async def deliver(self, config: CanaryConfig | None) -> None:
        """How new versions go out from now on."""
        told = None if config is None else config.model_dump(mode="json")
        await asyncio.to_thread(self.api.put, f"{PATH}/delivery", {"canary": told})

    async def shown(self) -> dict[str, Any]:
        """What `attune canary show --json` prints."""
        told: dict[str, Any] = await asyncio.to_thread(self.api.get, f"{PATH}/deployment")
        return told

    async def deployment(self) -> Deployment:
        async with self.db.read() as session:
            return await session.get_one(Deployment, self.policy_id)

    async def publish(self, made: Made, state: VersionState) -> Version:
        """Committed as the trainer commits it, and come home."""
        version_id = await publish(self.db, self.settings, self.policy_id, made)

        async def home() -> bool:
            version = await self.version(version_id)
            assert version.state != VersionState.REJECTED, version.reason
            return version.state == state

        await until(home, HOME_SECONDS, f"the version is {state}")
        return await self.version(version_id)

    async def head(self) -> int:
        """The number of the version that learning goes on from."""
        async with self.db.read() as session:
            policy = await session.get_one(Policy, self.policy_id)
            return (await session.get_one(Version, policy.head_version_id)).number

    async def version(self, version_id: str) -> Version:
        async with self.db.read() as session:
            return await session.get_one(Version, version_id)

    async def command(self, *arguments: str) -> str:
        """What `attune …` prints."""
        command = [sys.executable, "-m", "app.cli.main", *arguments]
        environment = os.environ | self.running.environment
        done = await asyncio.to_thread(
            subprocess.run, command, env=environment, check=True, stdout=subprocess.PIPE, text=True
        )
        return done.stdout

    async def learn_on(self) -> Version:
        """One update of the real trainer on the thumbs that wait. It goes out as a canary, which is ended."""
        async with self.db.read() as session:
            before = await session.scalar(select(func.max(Version.number)))

        async def new() -> Version | None:
            async with self.db.read() as session:
                rows = await session.scalars(
                    select(Version).where(Version.number > before, Version.state == VersionState.CANARY)
                )
                return rows.first()

        await self.post("training/resume")
        self.running.start("trainer")
        await until(new, LEARNED_SECONDS, "the trainer has made a version")
        await self.post("training/pause")
        version = await new()
        assert version is not None
        self.running.children["trainer"].stop()
        await self.post("canary/abort")
        return version

    async def learned_from(self, batch_id: str) -> set[str]:
        """The versions whose replies were in a batch."""
        async with self.db.read() as session:
            return set(await session.scalars(select(Sample.version_id).where(Sample.batch_id == batch_id)))


def progress(folder: Path) -> tuple[int, int]:
    """Updates and optimizer steps that a version stands on."""
    told = json.loads((folder / STATE).read_text())
    return told["updates"], told["optimizer_steps"]


@asynccontextmanager
async def harness(serving: Made, kind: str, seed: int) -> AsyncIterator[Harness]:
    """Everything up, `serving` live, and learning paused."""
    with TemporaryDirectory(prefix="attune-canary-") as folder, database(kind, Path(folder)) as url:
        await asyncio.to_thread(upgrade, url)
        settings = Settings(
            home=Path(folder),
            database_url=url,
            policy=POLICY,
            engine_port=free_port(),
            requests_per_minute=10**9,
            learning_rate=1.5e-3,
            kl_coef=0.02,
            max_rater_share=0.1,  # nobody comes often
            seed=seed,
        )
        task_sender = TaskSender(make_celery(settings.broker_url, settings.broker_dir))
        db = Database(url, task_sender)
        async with db.write() as session:
            key = await bootstrap(session, settings.policy, settings.model)
        async with db.read() as session:
            policy_id = await session.scalar(select(Policy.id))
        assert key is not None and policy_id is not None
        save_api_key(settings, key)
        with processes(settings) as running:
            await asyncio.to_thread(running.start, "engine", "worker", "publisher", "beat", "api")

            async def ready() -> bool:
                async with db.read() as session:
                    return bool((await session.scalars(select(Engine).where(Engine.state == EngineState.READY))).all())

            await until(ready, 300, "the engine is ready")
            there = Harness(running.settings, db, policy_id, running, Api(running.settings))
            await there.post("training/pause")
            there.stable = (await there.publish(serving, VersionState.LIVE)).number
            yield there
        await db.close()
        task_sender.close()
