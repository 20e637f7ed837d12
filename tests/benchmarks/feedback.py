"""Measure feedback stored durably per second, singly and in batches: `python -m tests.benchmarks.feedback`."""

import argparse
from collections.abc import Callable
from itertools import count
from statistics import median
from typing import Any
from uuid import uuid4

import orjson
import uvloop
from sqlalchemy import func, select

from app.models import Feedback
from tests.benchmarks.deployment import DATABASES, POLICY, Deployment, deployment, machine, scripted_process
from tests.benchmarks.http_client import ConnectionPool, post
from tests.benchmarks.load import closed_loop, quantile
from tests.benchmarks.overhead import MESSAGES

BATCH = 500


class VoteRequests:
    """Requests with new binary feedback, each with its own id, on the given turns."""

    def __init__(self, target: Deployment, turns: list[str]) -> None:
        self.target, self.turns = target, turns
        self._run, self._numbers = uuid4().hex[:8], count()

    def item(self) -> dict[str, Any]:
        number = next(self._numbers)
        turn = self.turns[number % len(self.turns)]
        return {"id": f"{self._run}-{number}", "completion_id": turn, "kind": "binary", "value": number % 2 == 0}

    def single(self) -> bytes:
        return post(self.target.url, "/v1/feedback", self.item(), self.target.headers)

    def batch(self) -> bytes:
        body = {"items": [self.item() for _ in range(BATCH)]}
        return post(self.target.url, "/v1/feedback/batch", body, self.target.headers)


async def create_turns(target: Deployment, number: int) -> list[str]:
    chat = post(target.url, "/v1/chat/completions", {"model": POLICY, "messages": MESSAGES}, target.headers)
    async with ConnectionPool(target.url) as pool:
        return [orjson.loads((await pool.request(chat)).body)["id"] for _ in range(number)]


async def count_rows(target: Deployment) -> int:
    async with target.db.read() as session:
        return await session.scalar(select(func.count()).select_from(Feedback)) or 0


async def measure(
    target: Deployment, kind: str, make: Callable[[], bytes], connections: int, args: argparse.Namespace, items: int
) -> None:
    await closed_loop(target.url, make, connections, 1, (200, 201))
    rounds, stored = [], 0
    for _ in range(args.rounds):
        before = await count_rows(target)
        rounds.append(await closed_loop(target.url, make, connections, args.seconds, (200, 201)))
        stored += await count_rows(target) - before
    latencies = [duration for durations, _, _ in rounds for duration in durations]
    rate = median(items * (len(durations) - errors) / seconds for durations, errors, seconds in rounds)
    errors = sum(errors for _, errors, _ in rounds)
    lost = items * (len(latencies) - errors) - stored
    requests = "single" if items == 1 else f"batches of {items}"
    p50, p99 = quantile(latencies, 0.5), quantile(latencies, 0.99)
    print(
        f"| {kind} | {requests} | {connections} | {rate:.0f} | {p50:.1f} | {p99:.1f} | {errors} | {lost} |", flush=True
    )


async def run(args: argparse.Namespace) -> None:
    print(f"{machine()}\n{args.rounds} rounds of {args.seconds:g} s; acknowledged after the commit\n")
    print("| database | requests | connections | items/s | p50 ms | p99 ms | errors | acknowledged but not stored |")
    print("|---|---|---|---|---|---|---|---|")
    for kind in args.databases:
        with scripted_process() as engine:
            async with deployment(kind, engine) as target:
                votes = VoteRequests(target, await create_turns(target, 100))
                for connections in args.connections:
                    await measure(target, kind, votes.single, connections, args, 1)
                await measure(target, kind, votes.batch, 2, args, BATCH)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--databases", nargs="+", choices=DATABASES, default=list(DATABASES))
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
