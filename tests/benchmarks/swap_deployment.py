"""The deployment that `make bench-swap` measures: replicas of real engines, of one kind or several, and APIs."""

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import httpx2
from sqlalchemy import select

from app.core.database import Database
from app.core.jobs import TaskSender, make_celery
from app.core.migrate import upgrade
from app.core.processes import ManagedProcess
from app.core.settings import Settings
from app.core.settings.engine import EngineKind
from app.inference.keys import load_engine_keys
from app.models import Engine, EngineState, Policy
from app.projects.service import bootstrap
from tests.benchmarks.deployment import POLICY, database
from tests.support.engine_fixture import free_port
from tests.support.processes import processes
from tests.support.settings import by_path

START_SECONDS = 1800.0  # until all replicas are ready: a loaded machine is no failure


@dataclass
class SwapDeployment:
    settings: Settings
    db: Database
    key: str
    policy_id: str
    urls: list[str]
    engines: list[str]
    supervisors: list[ManagedProcess]


@asynccontextmanager
async def run_deployment(
    kind: str, *, engine_kinds: Sequence[EngineKind] = ("sglang",), replicas: int, apis: int, **overrides: Any
) -> AsyncIterator[SwapDeployment]:
    """Run a deployment with a database of `kind`.

    Args:
        engine_kinds: The replicas are of these kinds in turn.
        overrides: Settings that differ from the defaults.
    """
    home = Path(mkdtemp(prefix="attune-swap-"))
    try:
        with database(kind, home) as url:
            await asyncio.to_thread(upgrade, url)
            ports = [free_port() for _ in range(replicas)]
            settings = Settings(
                home=home,
                database={"url": url},
                policy=POLICY,
                engine={"port": ports[0], "kind": engine_kinds[0]},
                limits={"requests_per_minute": 10**9},
            ).replace(by_path(overrides))
            task_sender = TaskSender(make_celery(settings.broker.url, settings.broker_dir))
            db = Database(url, task_sender)
            async with db.write() as session:
                key = await bootstrap(session, settings.policy, settings.model)
            async with db.read() as session:
                policy_id = await session.scalar(select(Policy.id))
            assert key is not None and policy_id is not None
            load_engine_keys(settings)  # create the keys before the replicas start, which would race for it
            with processes(settings) as running:
                python, logs, urls = sys.executable, settings.logs_dir, [running.settings.local_url]
                kinds = dict(zip(ports, cycle(engine_kinds), strict=False))
                for number, port in enumerate(ports[1:], 1):
                    child = ManagedProcess(
                        f"engine-{number}", [python, "-m", "workers.engine"], logs / f"engine-{number}.log"
                    )
                    child.environment |= {
                        "ATTUNE_ENGINE__NAME": f"engine-{number}",
                        "ATTUNE_ENGINE__PORT": str(port),
                        "ATTUNE_ENGINE__KIND": kinds[port],
                    }
                    running.children[child.name] = child
                for number in range(1, apis):
                    port = free_port()
                    child = ManagedProcess(
                        f"api-{number}", [python, "-m", "app.cli.main", "serve"], logs / f"api-{number}.log"
                    )
                    running.children[child.name] = child
                    urls.append(f"http://127.0.0.1:{port}")
                    child.environment |= {"ATTUNE_SERVER__PORT": str(port)}
                own_environments = {name: dict(child.environment) for name, child in running.children.items()}
                servers = [name for name in running.children if name.startswith(("engine", "api"))]
                for name in (*servers, "publisher", "worker", "beat"):
                    child = running.children[name]
                    child.environment |= running.environment | own_environments[name]
                    child.start()
                engines = [f"http://127.0.0.1:{port}" for port in ports]
                supervisors = [child for name, child in running.children.items() if name.startswith("engine")]
                deployment = SwapDeployment(running.settings, db, key, policy_id, urls, engines, supervisors)
                await wait_until_ready(deployment, replicas)
                yield deployment
            await db.close()
            task_sender.close()
    finally:
        shutil.rmtree(home)


async def wait_until_ready(deployment: SwapDeployment, replicas: int) -> None:
    async with asyncio.timeout(START_SECONDS):
        while True:
            async with deployment.db.read() as session:
                ready = list(await session.scalars(select(Engine).where(Engine.state == EngineState.READY)))
            if len(ready) == replicas:
                break
            await asyncio.sleep(0.2)
        for url in deployment.urls:
            while True:
                try:
                    if httpx2.get(f"{url}/livez", timeout=1, trust_env=False).status_code == 200:
                        break
                except httpx2.TransportError:
                    await asyncio.sleep(0.1)
