"""What Attune adds to a reply of the (scripted) engine, durable capture on: `python -m tests.benchmarks.overhead`."""

import argparse
from dataclasses import dataclass, field
from statistics import median
from typing import Any
from uuid import uuid4

import uvloop
from sqlalchemy import func, select

from app.inference.request import ChatCall, Sampling
from app.models import Turn, TurnState
from tests.benchmarks.deployment import DATABASES, POLICY, Deployment, deployment, machine, scripted_process
from tests.benchmarks.load import Round, open_loop, quantile
from tests.benchmarks.wire import post

MESSAGES = [
    {"role": "system", "content": "You are the assistant of a bicycle shop. Be brief and kind."},
    {"role": "user", "content": "When do you open on Saturday, and can I bring my bicycle for a check?"},
]


@dataclass
class Compared:
    """Rounds straight to the engine and through Attune, in turns."""

    alone: list[Round] = field(default_factory=list)
    through: list[Round] = field(default_factory=list)

    def row(self, part: str) -> str:
        cells = []
        for share in (0.5, 0.99):
            alone = [quantile(getattr(round, part), share) for round in self.alone]
            through = [quantile(getattr(round, part), share) for round in self.through]
            added = median(b - a for a, b in zip(alone, through, strict=True))
            cells += [f"{median(alone):.2f}", f"{median(through):.2f}", f"**{added:.2f}**"]
        errors = sum(round.errors for round in self.alone + self.through)
        late = quantile([late for round in self.through for late in round.late], 0.99)
        cpu = max(round.cpu for round in self.alone + self.through)
        return " | ".join([*cells, str(errors), f"{late:.2f}", f"{cpu:.0%}"])


def bare(url: str, stream: bool) -> bytes:
    """What Attune asks of the engine for this very chat. Ids may repeat: the engine is asked nothing by them."""
    call = ChatCall(f"chatcmpl-{uuid4().hex}", MESSAGES, Sampling(512), extra_key="bench")
    return post(url, "/v1/chat/completions", call.body(stream=stream))


def asked(deployment: Deployment, stream: bool) -> bytes:
    body: dict[str, Any] = {"model": POLICY, "messages": MESSAGES, "stream": stream}
    return post(deployment.url, "/v1/chat/completions", body, deployment.headers)


async def compare(there: Deployment, engine: str, stream: bool, rate: float, given: argparse.Namespace) -> Compared:
    compared = Compared()
    straight, through = bare(engine, stream), asked(there, stream)
    for number in range(given.rounds):
        pair = [(compared.alone, engine, straight), (compared.through, there.url, through)]
        for rounds, url, request in pair if number % 2 else reversed(pair):
            rounds.append(await open_loop(url, request, rate, given.seconds, seed=number))
    return compared


async def unfinished(there: Deployment) -> int:
    """Turns that are not on record as done and trainable: durable capture was on, or the figures are worth nothing."""
    async with there.db.read() as session:
        lost = select(func.count()).where((Turn.state != TurnState.DONE) | Turn.exclusion_reason.is_not(None))
        return await session.scalar(lost) or 0


async def run(given: argparse.Namespace) -> None:
    print(f"{machine()}\n{given.rounds} rounds of {given.seconds:g} s each way, in turns; milliseconds\n")
    print(
        "| database | reply | req/s | p50 engine | p50 Attune | p50 added | p99 engine | p99 Attune | p99 added "
        "| errors | generator late, p99 | generator CPU |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for kind in given.databases:
        with scripted_process() as engine:
            async with deployment(kind, engine) as there:
                await open_loop(there.url, asked(there, True), 50, 2, seed=99)  # warm: imports, pools, statement caches
                for stream, part, name in ((False, "whole", "whole"), (True, "first", "first token, streamed")):
                    for rate in given.rates:
                        compared = await compare(there, engine, stream, rate, given)
                        print(f"| {kind} | {name} | {rate:g} | {compared.row(part)} |", flush=True)
                print(f"turns not done or flawed on {kind}: {await unfinished(there)}", flush=True)


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--rates", type=float, nargs="+", default=[100, 200])
    given.add_argument("--seconds", type=float, default=10)
    given.add_argument("--rounds", type=int, default=5)
    given.add_argument("--databases", nargs="+", choices=DATABASES, default=list(DATABASES))
    uvloop.run(run(given.parse_args()))


if __name__ == "__main__":
    main()
