"""Durable feedback: acknowledgements a second, one by one and in batches: `python -m tests.benchmarks.feedback`."""

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
from tests.benchmarks.load import closed_loop, quantile
from tests.benchmarks.overhead import MESSAGES
from tests.benchmarks.wire import Wires, post

BATCH = 500


class Thumbs:
    """New feedback each time, each with an id of its own, on a few hundred turns."""

    def __init__(self, there: Deployment, turns: list[str]) -> None:
        self.there, self.turns = there, turns
        self._run, self._numbers = uuid4().hex[:8], count()

    def item(self) -> dict[str, Any]:
        number = next(self._numbers)
        turn = self.turns[number % len(self.turns)]
        return {"id": f"{self._run}-{number}", "completion_id": turn, "kind": "binary", "value": number % 2 == 0}

    def one(self) -> bytes:
        return post(self.there.url, "/v1/feedback", self.item(), self.there.headers)

    def batch(self) -> bytes:
        body = {"items": [self.item() for _ in range(BATCH)]}
        return post(self.there.url, "/v1/feedback/batch", body, self.there.headers)


async def turns(there: Deployment, number: int) -> list[str]:
    chat = post(there.url, "/v1/chat/completions", {"model": POLICY, "messages": MESSAGES}, there.headers)
    async with Wires(there.url) as wires:
        return [orjson.loads((await wires.ask(chat)).body)["id"] for _ in range(number)]


async def rows(there: Deployment) -> int:
    async with there.db.read() as session:
        return await session.scalar(select(func.count()).select_from(Feedback)) or 0


async def line(
    there: Deployment, kind: str, make: Callable[[], bytes], connections: int, given: argparse.Namespace, each: int
) -> None:
    await closed_loop(there.url, make, connections, 1, (200, 201))
    rounds, stored = [], 0
    for _ in range(given.rounds):
        before = await rows(there)
        rounds.append(await closed_loop(there.url, make, connections, given.seconds, (200, 201)))
        stored += await rows(there) - before
    took = [each for taken, _, _ in rounds for each in taken]
    acks = median(each * (len(taken) - errors) / seconds for taken, errors, seconds in rounds)
    errors = sum(errors for _, errors, _ in rounds)
    lost = each * (len(took) - errors) - stored
    what = "one by one" if each == 1 else f"batches of {each}"
    p50, p99 = quantile(took, 0.5), quantile(took, 0.99)
    print(f"| {kind} | {what} | {connections} | {acks:.0f} | {p50:.1f} | {p99:.1f} | {errors} | {lost} |", flush=True)


async def run(given: argparse.Namespace) -> None:
    print(f"{machine()}\n{given.rounds} rounds of {given.seconds:g} s; acknowledged after the commit\n")
    print("| database | how | connections | items/s | p50 ms | p99 ms | errors | acknowledged but not stored |")
    print("|---|---|---|---|---|---|---|---|")
    for kind in given.databases:
        with scripted_process() as engine:
            async with deployment(kind, engine) as there:
                thumbs = Thumbs(there, await turns(there, 100))
                for connections in given.connections:
                    await line(there, kind, thumbs.one, connections, given, 1)
                await line(there, kind, thumbs.batch, 2, given, BATCH)


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--connections", type=int, nargs="+", default=[1, 16, 64])
    given.add_argument("--seconds", type=float, default=10)
    given.add_argument("--rounds", type=int, default=3)
    given.add_argument("--databases", nargs="+", choices=DATABASES, default=list(DATABASES))
    uvloop.run(run(given.parse_args()))


if __name__ == "__main__":
    main()
