"""The deployment that the benchmarks measure: a scripted engine and an API in two processes, and a new database."""

import asyncio
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from uuid import uuid4

import httpx2
import psycopg

from app.core.database import Database
from app.core.migrate import upgrade
from app.core.settings import Settings
from app.models import Engine, EngineState
from app.projects.service import bootstrap
from tests.support.engine_fixture import free_port
from tests.support.processes import Processes, processes
from tests.support.settings import by_path

POSTGRES = os.environ.get("ATTUNE_TEST_POSTGRES", "postgresql://postgres@127.0.0.1:5432/test")
DATABASES = ("sqlite", "postgresql")
POLICY = "shop"


@dataclass(frozen=True)
class Deployment:
    url: str
    key: str
    db: Database
    settings: Settings
    running: Processes

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    @property
    def api_pid(self) -> int:
        process = self.running.children["api"].process
        assert process is not None
        return process.pid


@contextmanager
def scripted_process(pace: float = 0.0) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "tests.support.scripted_engine", "--port", str(port), "--pace", str(pace)]
    process = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(f"{url}/ready")
        yield url
    finally:
        process.terminate()
        process.wait()


def wait_for(url: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            httpx2.get(url, timeout=1, trust_env=False)
            return
        except httpx2.TransportError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


@contextmanager
def database(kind: str, home: Path) -> Iterator[str]:
    if kind == "sqlite":
        yield f"sqlite+aiosqlite:///{home}/attune.db"
        return
    name = f"attune_bench_{uuid4().hex[:8]}"
    with psycopg.connect(POSTGRES, autocommit=True) as server:
        server.execute(f"CREATE DATABASE {name}")
        try:
            yield POSTGRES.rpartition("/")[0].replace("postgresql://", "postgresql+psycopg://") + f"/{name}"
        finally:
            server.execute(f"DROP DATABASE {name} WITH (FORCE)")


@asynccontextmanager
async def deployment(kind: str, engine_url: str, *, api: str | None = None, **values: Any) -> AsyncIterator[Deployment]:
    """Run one API process for the engine at `engine_url`, without rate limits. `api`: the module to run."""
    home = Path(mkdtemp(prefix="attune-bench-"))
    try:
        with database(kind, home) as url:
            await asyncio.to_thread(upgrade, url)
            limits: dict[str, Any] = {"requests_per_minute": 10**9, "max_concurrency": 10**6, **values}
            settings = Settings(home=home, database={"url": url}, policy=POLICY).replace(by_path(limits))
            db = Database(url)
            key = await create_project(db, settings, engine_url)
            with processes(settings) as running:
                if api is not None:
                    running.children["api"].command = [sys.executable, "-m", api]
                await asyncio.to_thread(running.start, "api")
                yield Deployment(running.settings.local_url, key, db, settings, running)
            await db.close()
    finally:
        shutil.rmtree(home)


async def create_project(db: Database, settings: Settings, engine_url: str) -> str:
    async with db.write() as session:
        key = await bootstrap(session, settings.policy, settings.model)
        session.add(Engine(name="engine-0", url=engine_url, state=EngineState.READY, incarnation=1, loaded=[]))
    assert key is not None
    return key


def machine() -> str:
    """Return one line that describes the machine and the package versions."""
    parts = [f"{os.cpu_count()} cores", platform.machine(), f"Python {platform.python_version()}"]
    parts += [f"{name} {version(name)}" for name in ("fastapi", "uvicorn", "sqlalchemy", "httpx2")]
    with psycopg.connect(POSTGRES) as server:
        parts.append(f"PostgreSQL {server.info.server_version // 10000}")
    load = os.getloadavg()[0]
    return ", ".join(parts) + f"; load average at the start {load:.1f}"
