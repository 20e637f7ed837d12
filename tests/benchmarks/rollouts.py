"""Measure the effect of group sampling on chat latency, on the real engine: `python -m tests.benchmarks.rollouts`.

One deployment, one engine. Rounds without and with group sampling alternate, each with the same duration and the same
simulated users, who pause between a reply and their next question. Latency is from the request to the last byte.
"""

import argparse
import asyncio
import random
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import httpx2
from sqlalchemy import func, select, update

from app.core.database import Database
from app.core.migrate import upgrade
from app.core.settings import DEMO_MODEL, Settings
from app.models import Judgement, Origin, Rollout, RolloutState, Turn
from demo.dialogues import HELD_OUT, SYSTEM, SimulatedUser
from tests.benchmarks.deployment import create_project, machine
from tests.benchmarks.first_token import sglang
from tests.benchmarks.load import quantile
from tests.support.engine_fixture import RunningEngine
from tests.support.processes import processes

POLICY = "shop"


@dataclass
class RoundMetrics:
    """Milliseconds to the first byte and to the last, errors, and the group samples and their tokens."""

    first_byte: list[float] = field(default_factory=list)
    last_byte: list[float] = field(default_factory=list)
    errors: int = 0
    group_samples: int = 0
    tokens: int = 0


async def simulate_user(api: httpx2.AsyncClient, seed: int, until: float, pause: float, metrics: RoundMetrics) -> None:
    rng = random.Random(seed)
    await asyncio.sleep(rng.expovariate(1 / pause))
    while time.perf_counter() < until:
        question = next(SimulatedUser(HELD_OUT + rng.randrange(100_000)).questions()).text
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        body = {"model": POLICY, "messages": messages, "stream": True, "max_tokens": 96}
        start = time.perf_counter()
        first = None
        try:
            async with api.stream("POST", "/v1/chat/completions", json=body) as reply:
                async for _ in reply.aiter_raw():
                    first = first or time.perf_counter()
                metrics.errors += reply.status_code != 200
        except httpx2.HTTPError:
            metrics.errors += 1
            continue
        metrics.first_byte.append(1000 * ((first or start) - start))
        metrics.last_byte.append(1000 * (time.perf_counter() - start))
        await asyncio.sleep(rng.expovariate(1 / pause))


async def run_round(
    api: httpx2.AsyncClient,
    db: Database,
    extra_replies: int,
    seed: int,
    args: argparse.Namespace,
    metrics: RoundMetrics,
) -> None:
    config = {
        "group_sampling": {"extra_replies": extra_replies, "tokens_per_hour": 10_000_000},
        "in_flight": args.in_flight,
    }
    config |= {"max_open_chats": args.max_open_chats}
    response = await api.put(f"/v1/policies/{POLICY}/rollouts", json=config)
    assert response.status_code == 200, response.text
    before = await count_group_samples(db)
    until = time.perf_counter() + args.seconds
    async with asyncio.TaskGroup() as tasks:
        for number in range(args.users):
            tasks.create_task(simulate_user(api, 1000 * seed + number, until, args.pause, metrics))
    after = await count_group_samples(db)
    metrics.group_samples += after[0] - before[0]
    metrics.tokens += after[1] - before[1]
    async with db.write() as session:  # the next round must not inherit work from this one
        await session.execute(update(Rollout).where(Rollout.state == RolloutState.OPEN).values(expires_at=0.0))
        await session.execute(update(Judgement).where(Judgement.state == "open").values(state="skipped"))
    await asyncio.sleep(3)


async def count_group_samples(db: Database) -> tuple[int, int]:
    """Return the number of finished group samples, and their tokens."""
    finished = (Turn.origin == Origin.GROUP_SAMPLE, Turn.num_output_tokens.is_not(None))
    async with db.read() as session:
        row = (await session.execute(select(func.count(), func.sum(Turn.num_output_tokens)).where(*finished))).one()
    return int(row[0]), int(row[1] or 0)


async def run(args: argparse.Namespace, engine: RunningEngine, folder: Path) -> None:
    settings = Settings(
        home=folder / "home",
        policy=POLICY,
        limits={"requests_per_minute": 10**9},
        rewards={"sources": [{"type": "explicit"}, {"type": "rule", "name": "ended", "function": "ended"}]},
        engine={"api_key": engine.spec.api_key, "admin_key": engine.spec.admin_key},
    )
    settings.home.mkdir()
    await asyncio.to_thread(upgrade, settings.database_url)
    db = Database(settings.database_url)
    key = await create_project(db, settings, engine.spec.url)
    results = {0: RoundMetrics(), args.extra_replies: RoundMetrics()}
    with processes(settings) as running:
        await asyncio.to_thread(running.start, "worker", "judge", "rollout", "beat", "api")
        headers = {"authorization": f"Bearer {key}"}
        async with httpx2.AsyncClient(
            base_url=running.settings.local_url, headers=headers, timeout=120, trust_env=False
        ) as api:
            warm_up = argparse.Namespace(**{**vars(args), "seconds": 5})
            await run_round(api, db, args.extra_replies, 99, warm_up, RoundMetrics())
            for number in range(args.rounds):
                order = list(results.items())
                for extra_replies, metrics in order if number % 2 else reversed(order):
                    await run_round(api, db, extra_replies, number, args, metrics)
    await db.close()
    print_results(results, args)


def print_results(results: dict[int, RoundMetrics], args: argparse.Namespace) -> None:
    print(f"{machine()}; real SGLang on the CPU, demo model, SQLite")
    rounds = f"{args.rounds} × {args.seconds:g} s each"
    print(f"{args.users} users, {args.pause:g} s between reply and question, {rounds}")
    print(f"in_flight {args.in_flight}, max_open_chats {args.max_open_chats}\n")
    print(
        "| extra replies | chats | errors | first byte p50 | p99 | last byte p50 | p99 | group samples | their tokens |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for extra_replies, metrics in results.items():
        cells: list[Any] = [extra_replies, len(metrics.last_byte), metrics.errors]
        cells += [
            f"{quantile(part, share):.0f}" for part in (metrics.first_byte, metrics.last_byte) for share in (0.5, 0.99)
        ]
        print("| " + " | ".join(map(str, [*cells, metrics.group_samples, metrics.tokens])) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extra-replies", type=int, default=3)
    parser.add_argument("--users", type=int, default=4)
    parser.add_argument("--pause", type=float, default=4.0, help="seconds, on average")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--in-flight", type=int, default=2)
    parser.add_argument("--max-open-chats", type=int, default=0)
    args = parser.parse_args()
    folder = Path(mkdtemp(prefix="attune-bench-"))
    try:
        with sglang(DEMO_MODEL) as engine:
            asyncio.run(run(args, engine, folder))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
