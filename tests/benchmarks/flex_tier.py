"""Measure what chats of people wait while planned attempts run: `python -m tests.benchmarks.flex_tier`.

People send a chat, read the reply and pause; meanwhile attempts chat without a pause. The attempts have no tier, or the
tier `flex`. The real SGLang on the CPU; it takes a few minutes.
"""

import argparse
import asyncio
import random
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import uvloop

from tests.benchmarks.deployment import POLICY, Deployment, deployment, machine
from tests.benchmarks.first_token import sglang
from tests.benchmarks.http_client import HttpConnection, post
from tests.benchmarks.load import quantile
from tests.support.engine_fixture import DEMO_MODEL

PERSON_TOKENS, ATTEMPT_TOKENS = 32, 64
PAUSE_SECONDS = 0.4  # of a person between two chats, on average


@dataclass(frozen=True)
class Load:
    """So many attempts at a time, with this tier."""

    num_attempts: int
    tier: str | None

    @property
    def label(self) -> str:
        return f"{self.num_attempts}, {self.tier}" if self.num_attempts else "none"


def chat_request(target: Deployment, text: str, tokens: int, tier: str | None) -> bytes:
    """Return a streamed chat."""
    body: dict[str, object] = {"model": POLICY, "messages": [{"role": "user", "content": text}], "stream": True}
    body |= {"max_tokens": tokens}
    if tier is not None:
        body["service_tier"] = tier
    return post(target.url, "/v1/chat/completions", body, target.headers)


async def attempt(target: Deployment, tier: str | None, number: int, ends: asyncio.Event) -> int:
    """Chat without a pause until `ends`. Return the number of replies."""
    connection, replies = await HttpConnection.connect(target.url), 0
    while not ends.is_set():
        text = f"Attempt {number}, try {replies}: guess a number."
        response = await connection.request(chat_request(target, text, ATTEMPT_TOKENS, tier))
        assert response.status == 200, response.body[:300]
        replies += 1
    connection.close()
    return replies


async def person(target: Deployment, number: int, chats: int) -> list[tuple[float, float]]:
    """Send chats with pauses. Return the milliseconds to the first and to the last token of each."""
    connection, waits = await HttpConnection.connect(target.url), []
    rng = random.Random(number)
    for index in range(chats):
        await asyncio.sleep(rng.uniform(0, 2 * PAUSE_SECONDS))
        request = chat_request(target, f"Person {number}, chat {index}: how are you?", PERSON_TOKENS, None)
        began_at = asyncio.get_running_loop().time()
        response = await connection.request(request)
        assert response.status == 200, response.body[:300]
        waits.append((1000 * (response.first_at - began_at), 1000 * (response.last_at - began_at)))
    connection.close()
    return waits


async def measure(target: Deployment, load: Load, people: int, chats: int) -> tuple[list[tuple[float, float]], int]:
    """Return the waits of people's chats, and the number of replies to attempts meanwhile."""
    ends = asyncio.Event()
    attempts = [asyncio.create_task(attempt(target, load.tier, n, ends)) for n in range(load.num_attempts)]
    await asyncio.sleep(1.0 if attempts else 0.0)  # all of them run
    waits = await asyncio.gather(*(person(target, number, chats) for number in range(people)))
    ends.set()
    return [wait for of_person in waits for wait in of_person], sum(await asyncio.gather(*attempts))


async def run(args: argparse.Namespace) -> None:
    print(f"{machine()}; {args.people} people, {args.rounds} rounds of {args.chats} chats each, arms in turns; ms\n")
    print("| running | attempts, tier | first token p50 | p95 | last token p50 | p95 | replies to attempts |")
    print("|---|---|---|---|---|---|---|")
    arms = [Load(0, None), *(Load(count, tier) for count in args.attempts for tier in ("default", "flex"))]
    for limit in args.running:
        with sglang(args.model, max_running_requests=limit or None) as engine:
            keys = {"engine__api_key": engine.spec.api_key, "engine__admin_key": engine.spec.admin_key}
            async with deployment("sqlite", engine.spec.url, **keys) as target:
                await measure(target, Load(2, None), 2, 3)
                waits: defaultdict[Load, list[tuple[float, float]]] = defaultdict(list)
                replies: defaultdict[Load, int] = defaultdict(int)
                for number in range(args.rounds):
                    for arm in arms if number % 2 else arms[::-1]:
                        found, count = await measure(target, arm, args.people, args.chats)
                        waits[arm] += found
                        replies[arm] += count
        for arm in arms:
            columns = [[wait[at] for wait in waits[arm]] for at in (0, 1)]
            cells = [f"{quantile(column, share):.0f}" for column in columns for share in (0.5, 0.95)]
            print(
                f"| {limit or 'as SGLang chooses'} | {arm.label} | {' | '.join(cells)} | {replies[arm]} |", flush=True
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--people", type=int, default=2)
    parser.add_argument("--chats", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--attempts", type=int, nargs="+", default=[4, 16])
    parser.add_argument(
        "--running", type=int, nargs="+", default=[0, 8], help="requests at a time; 0: as SGLang chooses"
    )
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
