"""Measure what votes about one reply cost, as their number grows, on SQLite and PostgreSQL.

python -m tests.benchmarks.one_reply

The votes are inserted as earlier releases stored them, without the limits of a source and of a target. In the case
"repeated" each source has voted a thousand times; in the case "people" each vote is of a source of its own, and waits
for a batch. The pages are requested from the application in this process, one request at a time; the vote is curated in
this process, too. Times are medians; on a machine with other work only their growth means anything.
"""

import argparse
import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import httpx2
from sqlalchemy import insert, select, text

from app.core.database import Database
from app.core.migrate import upgrade
from app.core.settings import Settings
from app.feedback.settled_votes import count_settled_votes
from app.main import create_app
from app.models import Deployment, Engine, EngineState, Feedback, Policy, Reward, Sample, SampleState, Version
from app.projects.service import bootstrap
from tests.benchmarks.deployment import database
from tests.support.turns import make_turn
from workers.curate import curate

VOTES_OF_SOURCE = 1000  # in the case "repeated"
CHUNK_SIZE = 1000
REPLY = "chatcmpl-reply"
CASES = ("repeated", "people")


async def insert_votes(db: Database, case: str, count: int) -> None:
    """Insert a reply with so many votes that were processed, with the rewards and the sample that they gave."""
    async with db.write() as session:
        policy = (await session.scalars(select(Policy))).one()
        version = (await session.scalars(select(Version).join(Deployment, Deployment.version_id == Version.id))).one()
        session.add(make_turn(policy, version, REPLY))
        session.add(Engine(name="engine-0", url="http://127.0.0.1:9", state=EngineState.READY, loaded=[]))
    shared: dict[str, Any] = {"project_id": policy.project_id, "turn_id": REPLY, "target": REPLY, "kind": "binary"}
    shared |= {"name": "default", "value": 1.0, "raw_value": "up", "source_kind": "HUMAN", "request_metadata": {}}
    shared |= {"fingerprint": "0" * 64, "processed": True}
    for start in range(0, count, CHUNK_SIZE):
        rows, rewards = [], []
        for number in range(start, min(count, start + CHUNK_SIZE)):
            source = number if case == "people" else number // VOTES_OF_SOURCE
            id = f"fb-{number}"
            rows.append({**shared, "id": id, "seq": number + 1, "idempotency_key": id, "source_id": f"person-{source}"})
            if case == "people" or (number + 1) % VOTES_OF_SOURCE == 0:
                rater = f"HUMAN/person-{source}"
                reward: dict[str, Any] = {
                    "id": f"rew-{number}",
                    "turn_id": REPLY,
                    "source": f"default/{rater}",
                    "rater": rater,
                }
                reward |= {"source": f"default/{rater}", "reward_source": "explicit", "feedback_seq": number + 1}
                reward |= {"value": 1.0, "weight": 0.5}
                rewards.append(reward)
        async with db.write() as session:
            await session.execute(insert(Feedback), rows)
            if rewards:
                await session.execute(insert(Reward), rewards)
    async with db.write() as session:
        values = {"turn_id": REPLY, "policy_id": policy.id, "version_id": version.id, "group_id": REPLY}
        session.add(Sample(**values, state=SampleState.OPEN, reward=1.0, ready_at=0.0, uses_feedback=True))
        if not db.embedded:
            set_last = text("SELECT setval(pg_get_serial_sequence('feedback', 'seq'), :last)")
            await session.execute(set_last, {"last": count})
    if not db.embedded:  # PostgreSQL does it by itself
        async with db.engine.connect() as connection:
            await (await connection.execution_options(isolation_level="AUTOCOMMIT")).execute(text("ANALYZE"))


async def time_of(act: Callable[[], Awaitable[object]], rounds: int) -> float:
    """Return the median of the milliseconds; one round if it takes long."""
    times: list[float] = []
    for _ in range(rounds):
        started = time.perf_counter()
        await act()
        times.append(1000 * (time.perf_counter() - started))
        if times[-1] > 5000:
            break
    return median(times)


async def measure(settings: Settings, case: str, count: int, rounds: int) -> dict[str, float | str]:
    """Return milliseconds by act, or the status of a request that was refused."""
    async with Database(settings.database_url) as db:
        async with db.write() as session:
            key = await bootstrap(session, settings.policy, settings.model)
        await insert_votes(db, case, count)
        while await count_settled_votes(db, settings):
            pass
        app = create_app(settings)
        result: dict[str, float | str] = {}
        async with (
            app.router.lifespan_context(app),
            httpx2.AsyncClient(
                transport=httpx2.ASGITransport(app),
                base_url="http://attune",
                headers={"authorization": f"Bearer {key}"},
                timeout=600.0,
            ) as api,
        ):
            status = 200

            async def get(path: str) -> None:
                nonlocal status
                status = (await api.get(path)).status_code

            async def vote() -> None:
                nonlocal status
                source = {"id": f"another-{time.monotonic_ns()}"}
                body = {"completion_id": REPLY, "kind": "binary", "value": "up", "source": source}
                status = (await api.post("/v1/feedback", json=body)).status_code

            async def curate_vote() -> None:
                await vote()
                await curate(db, settings)

            acts: dict[str, Callable[[], Awaitable[object]]] = {
                "votes": lambda: get("/v1/policies/shop/votes"),
                "list of 1,000": lambda: get(f"/v1/feedback?completion_id={REPLY}&limit=1000"),
                "last page of 100": lambda: get(f"/v1/feedback?completion_id={REPLY}&limit=100&order=desc"),
                "status": lambda: get("/v1/status"),
                "a vote": vote,
                "a vote, curated": curate_vote,
            }
            for name, act in acts.items():
                await act()
                taken = await time_of(act, rounds)
                result[name] = taken if status in (200, 201) else f"{status} after {taken:.0f}"
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--votes", nargs="+", type=int, default=[1000, 4000, 16_000, 100_000])
    parser.add_argument("--databases", nargs="+", default=["sqlite", "postgres"])
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    for kind in args.databases:
        for case in args.cases:
            print(f"\n{kind}, {case}; load average {os.getloadavg()[0]:.1f}", flush=True)
            for count in args.votes:
                with TemporaryDirectory() as home, database(kind, Path(home)) as url:
                    upgrade(url)
                    settings = Settings(database={"url": url}, policy="shop", home=Path(home))
                    figures = asyncio.run(measure(settings, case, count, args.rounds))
                cells = [one if isinstance(one, str) else f"{one:.0f}" for one in figures.values()]
                if count == args.votes[0]:
                    print(f"| votes | {' | '.join(figures)} |\n|---|{'---|' * len(figures)}")
                print(f"| {count:,} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
