"""How long a backup of many turns takes, how large it is, and how long chats take meanwhile.

Run it with `python -m tests.benchmarks.backup [--turns 100000] [--postgres URL-of-an-empty-database]`.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx2

from app.core.database import Database
from app.core.migrate import upgrade
from app.core.settings import Settings
from app.main import create_app
from app.models import Engine, EngineState, new_id
from app.projects.service import bootstrap
from tests.support.backups import create_sealed_version
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine, serve
from tests.support.turns import make_turn

CHUNK = 1000
BASELINE_SECONDS = 15.0


async def create_turns(harness: Harness, count: int) -> None:
    """Create finished turns with a prompt of 300 tokens and a reply of 60, about what a short conversation has."""
    policy, version, rng = await harness.policy(), await harness.serving(), random.Random(0)
    for start in range(0, count, CHUNK):
        async with harness.db.write() as session:
            for number in range(start, min(start + CHUNK, count)):
                text = "".join(rng.choices("abcdefghij klmnop", k=900))
                values = {
                    "prompt_ids": rng.choices(range(30_000), k=300),
                    "output_ids": rng.choices(range(30_000), k=60),
                    "logprobs": [rng.random() for _ in range(60)],
                    "messages": [{"role": "user", "content": text}],
                    "reply": {"role": "assistant", "content": text[:200]},
                    "conversation_id": f"conversation-{number // 5}",
                }
                session.add(make_turn(policy, version, new_id("chatcmpl"), **values))


async def chat_until(api: httpx2.AsyncClient, done: asyncio.Event) -> list[float]:
    """Chat, four conversations at a time. Returns the milliseconds of each reply."""

    async def converse() -> list[float]:
        delays = []
        while not done.is_set():
            began = time.perf_counter()
            body = {"model": "shop@v0", "messages": [{"role": "user", "content": "When do you open?"}]}
            answer = await api.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            delays.append(1000 * (time.perf_counter() - began))
            await asyncio.sleep(0.02)
        return delays

    return [delay for delays in await asyncio.gather(*(converse() for _ in range(4))) for delay in delays]


def summarize(delays: list[float]) -> dict[str, float]:
    p50, p99 = statistics.median(delays), statistics.quantiles(delays, n=100)[98]
    return {"chats": len(delays), "p50_ms": round(p50, 1), "p99_ms": round(p99, 1), "max_ms": round(max(delays), 1)}


async def measure(settings: Settings, num_turns: int, folder: Path) -> None:
    async with Database(settings.database_url) as db:
        async with db.write() as session:
            key = await bootstrap(session, settings.policy, settings.model)
            engine = Engine(name="engine-0", url="", state=EngineState.READY, incarnation=1, loaded=[])
            session.add(engine)
        harness = Harness(settings=settings, db=db, key=key or "")
        for number in range(1, 11):
            await create_sealed_version(harness, number)
        await create_turns(harness, num_turns)
        app = create_app(settings)
        transport, headers = httpx2.ASGITransport(app), {"authorization": f"Bearer {key}"}
        with serve(ScriptedEngine(record_requests=False)) as url:
            async with db.write() as session:
                (await session.get_one(Engine, "engine-0")).url = url
            async with (
                app.router.lifespan_context(app),
                httpx2.AsyncClient(transport=transport, base_url="http://attune", headers=headers) as api,
            ):
                for what, run in (("alone", asyncio.sleep(BASELINE_SECONDS)), ("backup", create(settings, folder))):
                    done = asyncio.Event()
                    chats = asyncio.create_task(chat_until(api, done))
                    result = await run
                    done.set()
                    print(what, json.dumps({"result": result, **summarize(await chats)}), flush=True)
    for command in ("verify", "restore"):
        began = time.perf_counter()
        home = {"ATTUNE_HOME": str(folder.parent / "restored")}
        home |= (
            {}
            if settings.database_url.startswith("sqlite")
            else {"ATTUNE_DATABASE__URL": settings.database_url + "_restored"}
        )
        await run_command(home, command, str(folder))
        print(command, round(time.perf_counter() - began, 1), "s", flush=True)


async def create(settings: Settings, folder: Path) -> dict[str, float]:
    environment = {"ATTUNE_HOME": str(settings.home), "ATTUNE_DATABASE__URL": settings.database_url}
    row = json.loads(await run_command(environment, "create", str(folder), "--json"))
    database = next(path for path in folder.iterdir() if path.name in ("attune.db", "attune.dump"))
    megabytes = {"backup_mb": row["bytes"] / 1e6, "database_file_mb": database.stat().st_size / 1e6}
    return {"seconds": row["seconds"], **{name: round(value, 1) for name, value in megabytes.items()}}


async def run_command(environment: dict[str, str], *command: str) -> bytes:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "app.cli.main", "backup", *command),
        env={**os.environ, **environment},
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, command
    return output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=100_000)
    parser.add_argument("--postgres", help="SQLAlchemy URL of an empty database; <name>_restored must be empty too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        url = options.postgres or f"sqlite+aiosqlite:///{name}/home/attune.db"
        settings = Settings(home=Path(name) / "home", database={"url": url}, policy="shop")
        settings.home.mkdir()
        upgrade(settings.database_url)
        asyncio.run(measure(settings, options.turns, Path(name) / "backup"))


if __name__ == "__main__":
    main()
