"""Measure the latency that Attune adds to a scripted engine: `python -m tests.benchmarks.overhead`."""

import argparse
from dataclasses import dataclass, field
from statistics import median
from typing import Any
from uuid import uuid4

import uvloop
from sqlalchemy import func, select

from app.inference.request import ChatCall, EngineTarget, Sampling
from app.inference.sglang.chat import chat_body
from app.models import Turn, TurnState
from tests.benchmarks.deployment import DATABASES, POLICY, Deployment, deployment, machine, scripted_process
from tests.benchmarks.http_client import post
from tests.benchmarks.load import Round, open_loop, quantile

MESSAGES = [
    {"role": "system", "content": "You are the assistant of a bicycle shop. Be brief and kind."},
    {"role": "user", "content": "When do you open on Saturday, and can I bring my bicycle for a check?"},
]


@dataclass
class Comparison:
    """Alternating rounds: directly to the engine, and through Attune."""

    direct: list[Round] = field(default_factory=list)
    via_attune: list[Round] = field(default_factory=list)

    def row(self, part: str) -> str:
        cells = []
        for share in (0.5, 0.99):
            direct = [quantile(getattr(round, part), share) for round in self.direct]
            via_attune = [quantile(getattr(round, part), share) for round in self.via_attune]
            added = median(b - a for a, b in zip(direct, via_attune, strict=True))
            cells += [f"{median(direct):.2f}", f"{median(via_attune):.2f}", f"**{added:.2f}**"]
        errors = sum(round.errors for round in self.direct + self.via_attune)
        delay = quantile([delay for round in self.via_attune for delay in round.late], 0.99)
        cpu = max(round.cpu for round in self.direct + self.via_attune)
        return " | ".join([*cells, str(errors), f"{delay:.2f}", f"{cpu:.0%}"])


def engine_request(url: str, stream: bool) -> bytes:
    """Return the request that Attune sends to the engine for this chat. Its id may repeat: the engine ignores it."""
    call = ChatCall(f"chatcmpl-{uuid4().hex}", MESSAGES, Sampling(512), EngineTarget(prefix_key="bench"))
    return post(url, "/v1/chat/completions", chat_body(call, stream=stream))


def attune_request(deployment: Deployment, stream: bool) -> bytes:
    body: dict[str, Any] = {"model": POLICY, "messages": MESSAGES, "stream": stream}
    return post(deployment.url, "/v1/chat/completions", body, deployment.headers)


async def compare(target: Deployment, engine: str, stream: bool, rate: float, args: argparse.Namespace) -> Comparison:
    comparison = Comparison()
    direct, via_attune = engine_request(engine, stream), attune_request(target, stream)
    for number in range(args.rounds):
        sides = [(comparison.direct, engine, direct), (comparison.via_attune, target.url, via_attune)]
        for rounds, url, request in sides if number % 2 else reversed(sides):
            rounds.append(await open_loop(url, request, rate, args.seconds, seed=number))
    return comparison


async def count_untrainable_turns(target: Deployment) -> int:
    """Count the turns that are not recorded as done and trainable. If there are any, durable capture failed."""
    async with target.db.read() as session:
        statement = select(func.count()).where((Turn.state != TurnState.DONE) | Turn.exclusion_reason.is_not(None))
        return await session.scalar(statement) or 0


async def run(args: argparse.Namespace) -> None:
    print(f"{machine()}\n{args.rounds} rounds of {args.seconds:g} s each, alternating; milliseconds\n")
    print(
        "| database | reply | req/s | p50 engine | p50 Attune | p50 added | p99 engine | p99 Attune | p99 added "
        "| errors | generator delay, p99 | generator CPU |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for kind in args.databases:
        with scripted_process() as engine:
            async with deployment(kind, engine) as target:
                warm_up = attune_request(target, True)  # imports, pools, statement caches
                await open_loop(target.url, warm_up, 50, 2, seed=99)
                for stream, part, name in (
                    (False, "last_byte", "not streamed"),
                    (True, "first_token", "first token, streamed"),
                ):
                    for rate in args.rates:
                        comparison = await compare(target, engine, stream, rate, args)
                        print(f"| {kind} | {name} | {rate:g} | {comparison.row(part)} |", flush=True)
                print(f"turns not done or not trainable on {kind}: {await count_untrainable_turns(target)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", type=float, nargs="+", default=[100, 200])
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--databases", nargs="+", choices=DATABASES, default=list(DATABASES))
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
