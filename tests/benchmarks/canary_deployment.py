"""The deployment that canaries are measured on: one engine, the API, the workers, and the trainer when it is needed."""

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
from app.projects.service import bootstrap
from tests.benchmarks.deployment import POLICY, database
from tests.benchmarks.swap_versions import UnpublishedVersion, publish
from tests.support.engine_fixture import free_port
from tests.support.processes import Processes, processes, until

RELEASE_SECONDS = 60.0  # the most that the release of a version takes
UPDATE_SECONDS = 300.0  # the most that an update takes, including the start of the trainer
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

    async def set_delivery(self, config: CanaryConfig | None) -> None:
        """Set how new versions are released: as canaries, or directly if `config` is None."""
        canary = None if config is None else config.model_dump(mode="json")
        await asyncio.to_thread(self.api.put, f"{PATH}/delivery", {"canary": canary})

    async def read_deployment(self) -> dict[str, Any]:
        """Return the response that `attune canary show --json` prints."""
        response: dict[str, Any] = await asyncio.to_thread(self.api.get, f"{PATH}/deployment")
        return response

    async def deployment(self) -> Deployment:
        async with self.db.read() as session:
            return await session.get_one(Deployment, self.policy_id)

    async def publish(self, unpublished: UnpublishedVersion, state: VersionState) -> Version:
        """Publish the version as the trainer does, and wait until it is in `state`."""
        version_id = await publish(self.db, self.settings, self.policy_id, unpublished)

        async def is_released() -> bool:
            version = await self.version(version_id)
            assert version.state != VersionState.REJECTED, version.reason
            return version.state == state

        await until(is_released, RELEASE_SECONDS, f"the version is {state}")
        return await self.version(version_id)

    async def head_number(self) -> int:
        """Return the number of the version that training continues from."""
        async with self.db.read() as session:
            policy = await session.get_one(Policy, self.policy_id)
            return (await session.get_one(Version, policy.head_version_id)).number

    async def version(self, version_id: str) -> Version:
        async with self.db.read() as session:
            return await session.get_one(Version, version_id)

    async def run_command(self, *arguments: str) -> str:
        """Run `attune` with the arguments, and return its output."""
        command = [sys.executable, "-m", "app.cli.main", *arguments]
        environment = os.environ | self.running.environment
        process = await asyncio.to_thread(
            subprocess.run, command, env=environment, check=True, stdout=subprocess.PIPE, text=True
        )
        return process.stdout

    async def run_update(self) -> Version:
        """Run one update of the real trainer on the pending feedback, and abort the canary that follows."""
        async with self.db.read() as session:
            before = await session.scalar(select(func.max(Version.number)))

        async def find_new_version() -> Version | None:
            async with self.db.read() as session:
                canaries = select(Version).where(Version.number > before, Version.state == VersionState.CANARY)
                return (await session.scalars(canaries.order_by(Version.number, Version.id))).first()

        await self.post("training/resume")
        self.running.start("trainer")
        await until(find_new_version, UPDATE_SECONDS, "the trainer has published a version")
        await self.post("training/pause")
        version = await find_new_version()
        assert version is not None
        self.running.children["trainer"].stop()
        await self.post("canary/abort")
        return version

    async def behavior_version_ids(self, batch_id: str) -> set[str]:
        """Return the ids of the versions whose replies are in the batch."""
        async with self.db.read() as session:
            return set(await session.scalars(select(Sample.version_id).where(Sample.batch_id == batch_id)))


def read_progress(folder: Path) -> tuple[int, int]:
    """Return the number of updates and of optimizer steps up to this version."""
    state = json.loads((folder / STATE).read_text())
    return state["updates"], state["optimizer_steps"]


@asynccontextmanager
async def harness(serving: UnpublishedVersion, kind: str, seed: int) -> AsyncIterator[Harness]:
    """Start all services, release `serving`, and pause training."""
    with TemporaryDirectory(prefix="attune-canary-") as folder, database(kind, Path(folder)) as url:
        await asyncio.to_thread(upgrade, url)
        settings = Settings(
            home=Path(folder),
            database={"url": url},
            policy=POLICY,
            engine={"port": free_port()},
            limits={"requests_per_minute": 10**9},
            trainer={"optim": {"lr": 1.5e-3}, "seed": seed},
            algorithm={"kl_coef": 0.02},
            raters={"max_rater_share": 0.1},
        )
        task_sender = TaskSender(make_celery(settings.broker.url, settings.broker_dir))
        db = Database(url, task_sender)
        async with db.write() as session:
            key = await bootstrap(session, settings.policy, settings.model)
        async with db.read() as session:
            policy_id = await session.scalar(select(Policy.id))
        assert key is not None and policy_id is not None
        save_api_key(settings, key)
        with processes(settings) as running:
            await asyncio.to_thread(running.start, "engine", "worker", "publisher", "beat", "api")

            async def is_ready() -> bool:
                async with db.read() as session:
                    return bool((await session.scalars(select(Engine).where(Engine.state == EngineState.READY))).all())

            await until(is_ready, 300, "the engine is ready")
            deployment = Harness(running.settings, db, policy_id, running, Api(running.settings))
            await deployment.post("training/pause")
            deployment.stable = (await deployment.publish(serving, VersionState.LIVE)).number
            yield deployment
        await db.close()
        task_sender.close()
