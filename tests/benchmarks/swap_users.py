"""Users who stream one reply after the other, and note when each piece came and which version it named."""

import asyncio
import random
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx2
import orjson

from demo.dialogues import HELD_OUT, SYSTEM, SimulatedUser

STALL_SECONDS = 1.0  # between two pieces of a reply that is under way
DATA = "data: "


@dataclass(frozen=True)
class Seen:
    """One reply, on `time.perf_counter`. `trouble`: why it is not a good one; what the stream
    itself said about its end begins with "told". `label`: the version that it named."""

    asked_at: float
    first_at: float
    widest: float  # seconds between two pieces, or from the last one to the end
    trouble: str | None
    id: str | None = None
    label: str | None = None


@dataclass
class Users:
    """`urls`: of the APIs, which they take in turns. `think`: seconds at most between a reply and the next question."""

    urls: list[str]
    key: str
    policy: str
    count: int
    max_tokens: int = 48
    think: float = 0.1
    seen: list[Seen] = field(default_factory=list)
    over: bool = False

    async def talk(self, seed: int) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(self.count):
                group.create_task(self._user(self.urls[number % len(self.urls)], random.Random(f"{seed}/{number}")))

    async def _user(self, url: str, rng: random.Random) -> None:
        headers = {"authorization": f"Bearer {self.key}"}
        async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=60, trust_env=False) as api:
            while not self.over:
                question = next(SimulatedUser(HELD_OUT + rng.randrange(100_000)).questions()).text
                messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
                body = {"model": self.policy, "messages": messages, "stream": True, "max_tokens": self.max_tokens}
                self.seen.append(await listen(api, body))
                await asyncio.sleep(rng.uniform(0, self.think))


async def listen(api: httpx2.AsyncClient, body: dict[str, Any]) -> Seen:
    asked_at = time.perf_counter()
    moments, labels, finished = list[float](), set[str](), False
    trouble = id = None
    try:
        async with api.stream("POST", "/v1/chat/completions", json=body) as reply:
            if reply.status_code != 200:
                return Seen(asked_at, asked_at, 0.0, f"refused: {reply.status_code}")
            id = reply.headers.get("x-completion-id")
            labels |= {reply.headers["x-policy-version"]} if "x-policy-version" in reply.headers else set()
            async for line in reply.aiter_lines():
                if not line.startswith(DATA) or line == f"{DATA}[DONE]":
                    continue
                chunk = orjson.loads(line[len(DATA) :])
                if "error" in chunk:
                    trouble = f"told: {chunk['error']['message']}"
                    continue
                labels.add(chunk["model"])
                for choice in chunk["choices"]:
                    finished |= choice["finish_reason"] in ("stop", "length")
                    if choice["delta"].get("content"):
                        moments.append(time.perf_counter())
    except httpx2.HTTPError as error:
        trouble = f"cut: {error!r}"
    moments.append(time.perf_counter())
    widest = max((after - before for before, after in pairwise(moments)), default=0.0)
    if trouble is None and not finished:
        trouble = "cut: it had no end"
    if trouble is None and len(labels) > 1:
        trouble = f"named {sorted(labels)}"
    return Seen(asked_at, moments[0], widest, trouble, id, next(iter(labels), None))
