"""A rolling restart of two API processes and two engines under load: no request fails, and no reply is cut."""

import asyncio
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import select

from app.core.database import Database
from app.core.processes import ManagedProcess
from app.core.settings import REPOSITORY, Settings
from app.models import Engine, EngineState, Turn, TurnState
from app.projects.service import bootstrap
from tests.support.balanced_load import SECONDS, Load
from tests.support.engine_fixture import DEMO_MODEL, free_port
from tests.support.processes import Processes, processes, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize("database_url", [pytest.param("postgres", marks=pytest.mark.postgres)], indirect=True),
]


@pytest.fixture
def engines(settings: Settings, tmp_path: Path) -> Iterator[list[ManagedProcess]]:
    """Two supervisors, each with a fake of SGLang whose replies take three seconds."""
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.workers.engine.fake_server "$@"\n')
    interpreter.chmod(0o755)
    environment = {
        "PYTHONPATH": str(REPOSITORY),
        "SGLANG_FAKE_FOLDER": str(tmp_path),
        "SGLANG_FAKE_SECONDS_PER_TOKEN": "0.3",
        "ATTUNE_HOME": str(settings.home),
        "ATTUNE_DATABASE__URL": settings.database_url,
        "ATTUNE_MODEL": str(DEMO_MODEL),
        "ATTUNE_ENGINE__PYTHON": str(interpreter),
    }
    with ExitStack() as stack:
        found = []
        for number in range(2):
            own = {"ATTUNE_ENGINE__NAME": f"engine-{number}", "ATTUNE_ENGINE__PORT": str(free_port())}
            ready_file = str(tmp_path / f"engine-{number}.ready")
            command = [sys.executable, "-m", "app.cli.main", "engine", "--ready-file", ready_file]
            engine = ManagedProcess(
                f"engine-{number}", command, tmp_path / f"engine-{number}.log", environment | own, 60
            )
            stack.callback(engine.stop)
            found.append(engine)
        yield found


@pytest.fixture
def apis(settings: Settings) -> Iterator[list[Processes]]:
    settings = settings.replace({"model": str(DEMO_MODEL), "server.shutdown_delay_seconds": 1.0})
    with processes(settings) as first, processes(settings) as second:
        for each in (first, second):
            each.environment |= {
                "ATTUNE_SERVER__SHUTDOWN_DELAY_SECONDS": "1.0",
                "ATTUNE_SERVER__SHUTDOWN_SECONDS": "60",
            }
            each.children["api"].stop_timeout = 60
        yield [first, second]


async def wait_until_ready(db: Database, names: set[str]) -> None:
    async def is_ready() -> bool:
        async with db.read() as session:
            rows = await session.scalars(select(Engine.name).where(Engine.state == EngineState.READY))
            return set(rows) >= names

    await until(is_ready, SECONDS, f"{sorted(names)} are ready")


async def test_rolling_restart_fails_no_request(
    settings: Settings, db: Database, apis: list[Processes], engines: list[ManagedProcess], tmp_path: Path
) -> None:
    async with db.write() as session:
        key = await bootstrap(session, settings.policy, str(DEMO_MODEL))
    assert key is not None
    for engine in engines:
        await asyncio.to_thread(engine.start)
    for api in apis:
        await asyncio.to_thread(api.start, "api")
    await wait_until_ready(db, {"engine-0", "engine-1"})
    load = Load([api.settings.local_url for api in apis], key)
    async with load.run():
        await load.wait_for_ready(2)
        await load.wait_for_replies()
        for api in apis:
            await asyncio.to_thread(api.children["api"].stop)
            await asyncio.to_thread(api.start, "api")
            await load.wait_for_ready(2)
            await load.wait_for_replies()
        for engine in engines:
            ready_file = tmp_path / f"{engine.name}.ready"
            assert ready_file.exists()
            await asyncio.to_thread(engine.stop)
            assert not ready_file.exists()
            await load.wait_for_replies(5)
            await asyncio.to_thread(engine.start)
            await until(partial(asyncio.to_thread, ready_file.exists), SECONDS, f"{engine.name} takes traffic")
            await load.wait_for_replies()
    async with db.read() as session:
        turns = Counter((await session.execute(select(Turn.engine, Turn.state))).tuples())
    print(
        f"\n{load.replies.total()} replies, {len(load.failures)} failures, longest {load.longest:.1f} s; {dict(turns)}"
    )
    assert load.failures == []
    ended = {engine: count for (engine, state), count in turns.items() if state == TurnState.DONE}
    assert set(ended) == {"engine-0", "engine-1"} and sum(ended.values()) >= load.replies.total()
