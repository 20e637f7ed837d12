"""Measure how long the removal of expired turns takes, and what chats notice: `python -m tests.benchmarks.retention`.

A new PostgreSQL database has the history of `tests.benchmarks.growth`. Steps empty `--expired` of its turns, at the
reconciler's interval and then without a pause, while another connection writes turns as chats do.
"""

import argparse
import asyncio
import os
import time
from pathlib import Path
from statistics import median, quantiles
from uuid import uuid4

import psycopg
from sqlalchemy import func, select, text

from app.core.database import Database
from app.core.migrate import upgrade
from app.core.settings import Settings
from app.models import Policy, Turn, new_id
from app.policies.repository import list_versions
from app.privacy import retention
from app.privacy.expired_rows import SECONDS_PER_DAY
from app.projects.service import bootstrap
from tests.benchmarks.grown_databases import SERVER, database_url
from tests.benchmarks.growth import insert_history
from tests.support.turns import make_turn


async def write_turns(db: Database, stop: asyncio.Event) -> list[float]:
    """Write a turn every 20 ms until `stop`; return the milliseconds of each."""
    async with db.read() as session:
        policy = (await session.scalars(select(Policy))).one()
        version = (await list_versions(session, policy.id))[-1]
    times: list[float] = []
    while not stop.is_set():
        started = time.perf_counter()
        async with db.write() as session:
            session.add(make_turn(policy, version, new_id("chatcmpl")))
        times.append(1000 * (time.perf_counter() - started))
        await asyncio.sleep(0.02)
    return times


async def remove_steps(db: Database, days: float, steps: int, pause: float) -> list[float]:
    """Remove so many steps of turns; return the milliseconds of each."""
    async with db.read() as session:
        project_id = (await session.scalars(select(Policy.project_id))).one()
    times: list[float] = []
    for _ in range(steps):
        started = time.perf_counter()
        count = await retention.remove_expired(db, project_id, "turns", days)
        times.append(1000 * (time.perf_counter() - started))
        if not count:
            break
        await asyncio.sleep(pause)
    return times


def describe(times: list[float]) -> str:
    p99 = quantiles(times, n=100, method="inclusive")[98]
    return f"p50 {median(times):.1f}, p99 {p99:.1f}, largest {max(times):.1f} ms ({len(times)})"


async def measure(settings: Settings, turns: int, expired: int) -> None:
    async with Database(settings.database_url) as db:
        async with db.write() as session:
            await bootstrap(session, settings.policy, settings.model)
        await insert_history(db, turns)
        async with db.read() as session:
            ages = select((func.max(Turn.created_at) - func.min(Turn.created_at)) / SECONDS_PER_DAY)
            days = float(await session.scalar(ages) or 0) * (1 - expired / turns)
            size = await session.scalar(text("SELECT pg_database_size(current_database())"))
        print(f"{turns:,} turns, {size / 1e9:.2f} GB; {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}")
        steps = expired // retention.STEP
        for name, count, pause in (("none", 0, 0.0), ("every 2 s", 10, 2.0), ("without a pause", steps, 0.0)):
            stop = asyncio.Event()
            writer = asyncio.create_task(write_turns(db, stop))
            started = time.perf_counter()
            times = await remove_steps(db, days, count, pause)
            seconds = time.perf_counter() - started
            if not count:
                await asyncio.sleep(10)
            stop.set()
            print(f"steps {name}: writing a turn {describe(await writer)}", flush=True)
            if times:
                print(f"  a step of {retention.STEP} turns: {describe(times)}; {seconds:.0f} s", flush=True)
        async with db.read() as session:
            left = await session.scalar(select(func.count()).select_from(Turn).where(Turn.deleted_at.is_(None)))
        print(f"{left:,} turns have their content")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=1_000_000)
    parser.add_argument("--expired", type=int, default=864_000, help="a month of one turn in three seconds")
    args = parser.parse_args()
    name = f"attune_retention_{uuid4().hex[:8]}"
    with psycopg.connect(SERVER, autocommit=True) as server:
        server.execute(f"CREATE DATABASE {name}")
        try:
            url = database_url(name)
            upgrade(url)
            asyncio.run(
                measure(Settings(database={"url": url}, policy="shop", home=Path("/tmp")), args.turns, args.expired)
            )
        finally:
            server.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


if __name__ == "__main__":
    main()
