"""What group samples cost the people who chat, on the real engine: `python -m tests.benchmarks.rollouts`.

One deployment, one engine. Rounds without and with group samples take turns, each of the same length and with the same
people, who read for a while between a reply and their next question. Latency counts from asking to the last byte.
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
from demo.dialogues import HELD_OUT, SYSTEM, Shopper
from tests.benchmarks.deployment import furnish, machine
from tests.benchmarks.first_token import sglang
from tests.benchmarks.load import quantile
from tests.support.engine_fixture import RunningEngine
from tests.support.processes import processes

POLICY = "shop"


@dataclass
class Heard:
    """Milliseconds to the first byte and to the last, and what was not answered."""

    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    errors: int = 0
    extra_replies: int = 0
    tokens: int = 0


async def person(api: httpx2.AsyncClient, seed: int, until: float, pause: float, heard: Heard) -> None:
    rng = random.Random(seed)
    await asyncio.sleep(rng.expovariate(1 / pause))
    while time.perf_counter() < until:
        question = next(Shopper(HELD_OUT + rng.randrange(100_000)).questions()).text
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        body = {"model": POLICY, "messages": messages, "stream": True, "max_tokens": 96}
        asked = time.perf_counter()
        first = None
        try:
            async with api.stream("POST", "/v1/chat/completions", json=body) as reply:
                async for _ in reply.aiter_raw():
                    first = first or time.perf_counter()
                heard.errors += reply.status_code != 200
        except httpx2.HTTPError:
            heard.errors += 1
            continue
        heard.first.append(1000 * ((first or asked) - asked))
        heard.whole.append(1000 * (time.perf_counter() - asked))
        await asyncio.sleep(rng.expovariate(1 / pause))


async def a_round(
    api: httpx2.AsyncClient, db: Database, extra_replies: int, seed: int, given: argparse.Namespace, heard: Heard
) -> None:
    config = {
        "group_sampling": {"extra_replies": extra_replies, "tokens_per_hour": 10_000_000},
        "in_flight": given.in_flight,
    }
    config |= {"most_chats": given.most_chats}
    answer = await api.put(f"/v1/policies/{POLICY}/rollouts", json=config)
    assert answer.status_code == 200, answer.text
    before = await counted(db)
    until = time.perf_counter() + given.seconds
    async with asyncio.TaskGroup() as people:
        for number in range(given.people):
            people.create_task(person(api, 1000 * seed + number, until, given.pause, heard))
    after = await counted(db)
    heard.group_samples += after[0] - before[0]
    heard.tokens += after[1] - before[1]
    async with db.write() as session:  # the next round begins with nothing left over from this one
        await session.execute(update(Rollout).where(Rollout.state == RolloutState.OPEN).values(expires_at=0.0))
        await session.execute(update(Judgement).where(Judgement.state == "open").values(state="skipped"))
    await asyncio.sleep(3)


async def counted(db: Database) -> tuple[int, int]:
    """Siblings that were sampled, and their tokens."""
    done = (Turn.origin == Origin.GROUP_SAMPLE, Turn.num_output_tokens.is_not(None))
    async with db.read() as session:
        row = (await session.execute(select(func.count(), func.sum(Turn.num_output_tokens)).where(*done))).one()
    return int(row[0]), int(row[1] or 0)


async def run(given: argparse.Namespace, engine: RunningEngine, folder: Path) -> None:
    settings = Settings(
        home=folder / "home",
        policy=POLICY,
        requests_per_minute=10**9,
        rewards={"sources": [{"type": "explicit"}, {"type": "rule", "name": "ended", "function": "ended"}]},  # type: ignore[arg-type]
        engine_api_key=engine.spec.api_key,
        engine_admin_key=engine.spec.admin_key,
    )
    settings.home.mkdir()
    await asyncio.to_thread(upgrade, settings.database)
    db = Database(settings.database)
    key = await furnish(db, settings, engine.spec.url)
    sides = {0: Heard(), given.extra_replies: Heard()}
    with processes(settings) as running:
        await asyncio.to_thread(running.start, "worker", "judge", "rollout", "beat", "api")
        headers = {"authorization": f"Bearer {key}"}
        async with httpx2.AsyncClient(
            base_url=running.settings.url, headers=headers, timeout=120, trust_env=False
        ) as api:
            warm = argparse.Namespace(**{**vars(given), "seconds": 5})
            await a_round(api, db, given.extra_replies, 99, warm, Heard())
            for number in range(given.rounds):
                order = list(sides.items())
                for group_samples, heard in order if number % 2 else reversed(order):
                    await a_round(api, db, group_samples, number, given, heard)
    await db.close()
    told(sides, given)


def told(sides: dict[int, Heard], given: argparse.Namespace) -> None:
    print(f"{machine()}; real SGLang on the CPU, demo model, SQLite")
    rounds = f"{given.rounds} × {given.seconds:g} s each way"
    print(f"{given.people} people, {given.pause:g} s between reply and question, {rounds}")
    print(f"in_flight {given.in_flight}, most_chats {given.most_chats}\n")
    print(
        "| group samples | chats | errors | first byte p50 | p99 | whole p50 | p99 | group samples sampled | their tokens |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for group_samples, heard in sides.items():
        cells: list[Any] = [group_samples, len(heard.whole), heard.errors]
        cells += [f"{quantile(part, share):.0f}" for part in (heard.first, heard.whole) for share in (0.5, 0.99)]
        print("| " + " | ".join(map(str, [*cells, heard.group_samples, heard.tokens])) + " |")


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("--extra-replies", type=int, default=3)
    asked.add_argument("--people", type=int, default=4)
    asked.add_argument("--pause", type=float, default=4.0, help="seconds, on average")
    asked.add_argument("--rounds", type=int, default=3)
    asked.add_argument("--seconds", type=float, default=60.0)
    asked.add_argument("--in-flight", type=int, default=2)
    asked.add_argument("--most-chats", type=int, default=0)
    given = asked.parse_args()
    folder = Path(mkdtemp(prefix="attune-bench-"))
    try:
        with sglang(DEMO_MODEL) as engine:
            asyncio.run(run(given, engine, folder))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
