"""The acts that `tests.benchmarks.long_acts` measures: what each prepares, and what it requests of the API."""

import argparse
import asyncio
import re
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx2
from sqlalchemy import func, select

from app.core.database import Database
from app.models import Feedback
from tests.benchmarks.deployment import POLICY, Deployment
from tests.support import many_rows
from tests.support.parquet_files import to_parquet

SLOW_CLIENTS = 3  # a project may have four exports at a time


@dataclass
class Target:
    """The service under test. `clean_up` ends what an act has left open beyond its end."""

    deployment: Deployment
    engine_url: str
    api: httpx2.AsyncClient
    turns: list[str]
    clean_up: ExitStack

    @property
    def db(self) -> Database:
        return self.deployment.db

    async def call(self, method: str, path: str, **options: Any) -> httpx2.Response:
        """Send a request that must succeed."""
        response = await self.api.request(method, path, **options)
        assert response.is_success, f"{method} {path}: {response.status_code} {response.text}"
        return response


class Act(NamedTuple):
    """`prepare` inserts the rows; `run` does the act, and returns what else it has found.

    `look` is called when no vote or chat is sent any more, and returns what it finds.
    """

    name: str
    prepare: Callable[[Target], Awaitable[object]]
    run: Callable[[Target], Awaitable[str]]
    look: Callable[[Target], Awaitable[str]] | None = None


async def import_dataset(target: Target, rows: int) -> str:
    file = to_parquet({"prompt": [f"Question {number % 1000}" for number in range(rows)]})
    await target.call("POST", "/v1/datasets?name=prompts&kind=prompts", content=file)
    return f"{len(file) / 1e6:.2f} MB"


async def erase_person(target: Target) -> str:
    erased = (await target.call("DELETE", f"/v1/subjects/HUMAN/{many_rows.PERSON}")).json()
    return f"{erased['feedback']} ratings"


async def roll_back(target: Target) -> str:
    await target.call("POST", f"/v1/policies/{POLICY}/rollback", json={"version": 0, "reason": "benchmark"})
    return ""


async def remove_expired(target: Target) -> str:
    """Remove the expired turns as `attune retention run` does."""
    await target.call("PUT", "/v1/retention", json={"turns": 30})
    removed = 0
    while step := (await target.call("POST", "/v1/retention/run", json={})).json()["removed"]["turns"]:
        removed += step
        await asyncio.sleep(0.05)
    return f"{removed:,} turns"


async def time_vote(target: Target) -> float:
    """Send a vote and return the seconds until it is processed."""
    started = time.perf_counter()
    body = {"completion_id": target.turns[0], "kind": "binary", "value": "up", "source": {"id": f"p-{started}"}}
    id = (await target.call("POST", "/v1/feedback", json=body)).json()["id"]
    while True:
        async with target.db.read() as session:
            if await session.scalar(select(Feedback.processed).where(Feedback.id == id)):
                return time.perf_counter() - started
        await asyncio.sleep(0.05)


async def curate_alone(target: Target) -> str:
    times = [await time_vote(target) for _ in range(10)]
    return f"a vote is processed after {median(times):.2f} s, {max(times):.2f} s at most"


async def curate_backlog(target: Target) -> str:
    waiting = select(func.count()).where(Feedback.project_id == many_rows.OTHER_PROJECT, ~Feedback.processed)
    await many_rows.release_backlog(target.db)
    times = [await time_vote(target)]
    while True:
        async with target.db.read() as session:
            if not await session.scalar(waiting):
                break
        times.append(await time_vote(target))
    return f"a vote of the other project is processed after {median(times):.2f} s, {max(times):.2f} s at most"


async def start_worker(target: Target, backlog: int) -> None:
    """Insert the backlog, start the worker, and wait until it processes votes."""
    await many_rows.insert_backlog(target.db, backlog, target.deployment.settings.model)
    await asyncio.to_thread(target.deployment.running.start, "worker")
    await time_vote(target)


async def start_versions(target: Target, count: int, samples: int) -> None:
    """Insert the versions, and let the engine load the one that serves."""
    await many_rows.insert_versions(target.db, count, samples)
    adapter = {"lora_name": f"{POLICY}-v{count}", "lora_path": "/nowhere"}
    loaded = await target.api.post(f"{target.engine_url}/load_lora_adapter", json=adapter)
    assert loaded.is_success, loaded.text


async def export_slowly(target: Target) -> str:
    """Let clients read the beginning of an export each, and no more of it; then export once more."""
    path = f"/v1/subjects/{many_rows.PERSON}/export"
    request = f"GET {path} HTTP/1.1\r\nhost: attune\r\nauthorization: Bearer {target.deployment.key}\r\n\r\n"
    address = urlsplit(target.deployment.url)
    for _ in range(SLOW_CLIENTS):
        client = target.clean_up.enter_context(socket.socket())
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await asyncio.to_thread(client.connect, (address.hostname, address.port))
        await asyncio.to_thread(client.sendall, request.encode())
        begin = await asyncio.to_thread(client.recv, 1000)
        assert begin.startswith(b"HTTP/1.1 200"), begin
    started = time.perf_counter()
    size = len((await target.call("GET", path)).content)
    return f"{SLOW_CLIENTS} clients stopped reading; another export of {size / 1e6:.0f} MB took " + (
        f"{time.perf_counter() - started:.1f} s"
    )


async def look_at_pool(target: Target) -> str:
    page = (await target.call("GET", "/metrics")).text
    found = re.search(r"^attune_db_pool_in_use (\S+)", page, re.MULTILINE)
    assert found is not None
    return f"; {float(found[1]):.0f} connections are in use while they wait"


async def do_nothing(target: Target) -> None:
    pass


def list_acts(args: argparse.Namespace) -> list[Act]:
    """Return the acts in the sizes that were asked for."""

    async def wait(target: Target) -> str:
        await asyncio.sleep(args.seconds)
        return ""

    acts = [
        Act("nothing", do_nothing, wait),
        Act(f"import of {args.rows:,} rows", do_nothing, lambda target: import_dataset(target, args.rows)),
        Act(
            f"deletion of a dataset of {args.rows:,} rows",
            lambda target: many_rows.insert_dataset(target.db, args.rows),
            lambda target: _get_text(target.call("DELETE", f"/v1/datasets/{many_rows.DATASET}")),
        ),
        Act(
            f"erasure of {args.ratings} ratings of conversations of {args.length} turns",
            lambda target: many_rows.insert_ratings(target.db, args.ratings, args.length),
            erase_person,
        ),
        *(
            Act(
                f"rollback over {count} versions of {args.samples} samples",
                partial(start_versions, count=count, samples=args.samples),
                roll_back,
            )
            for count in args.versions
        ),
        Act(
            f"retention, {args.expired:,} turns",
            lambda target: many_rows.insert_turns(target.db, args.expired, age=many_rows.OLD_SECONDS),
            remove_expired,
        ),
        Act("curate, nothing waits", lambda target: start_worker(target, 1), curate_alone),
        Act(
            f"curate, {args.backlog:,} votes of another project",
            lambda target: start_worker(target, args.backlog),
            curate_backlog,
        ),
        Act(
            f"exports of {args.exported:,} turns, slow clients",
            lambda target: many_rows.insert_turns(target.db, args.exported, end_user=many_rows.PERSON),
            export_slowly,
            look_at_pool,
        ),
    ]
    return [act for act in acts if any(act.name.startswith(name) for name in args.acts)] if args.acts else acts


async def _get_text(response: Awaitable[httpx2.Response]) -> str:
    await response
    return ""
