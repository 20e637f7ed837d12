"""Simulated users who stream replies, and record when each chunk arrived and which version it named."""

import asyncio
import random
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx2
import orjson

from demo.dialogues import HELD_OUT, SYSTEM, SimulatedUser

STALL_SECONDS = 1.0  # between two chunks of a reply
DATA = "data: "


@dataclass(frozen=True)
class ReplyRecord:
    """One reply; times are on `time.perf_counter`.

    `failure`: why the reply is not good. It begins with "reported" if the stream had an error event. `label`: the
    version that the reply named.
    """

    requested_at: float
    first_at: float
    largest_gap: float  # seconds between two chunks, or from the last one to the end
    failure: str | None
    id: str | None = None
    label: str | None = None
    text: str = ""


@dataclass
class Users:
    """`urls`: the APIs, to which the users are assigned in turn. `think`: most seconds between reply and question."""

    urls: list[str]
    key: str
    policy: str
    count: int
    max_tokens: int = 48
    think: float = 0.1
    replies: list[ReplyRecord] = field(default_factory=list)
    stopped: bool = False

    async def chat(self, seed: int) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(self.count):
                group.create_task(self._user(self.urls[number % len(self.urls)], random.Random(f"{seed}/{number}")))

    async def _user(self, url: str, rng: random.Random) -> None:
        headers = {"authorization": f"Bearer {self.key}"}
        async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=60, trust_env=False) as api:
            while not self.stopped:
                question = next(SimulatedUser(HELD_OUT + rng.randrange(100_000)).questions()).text
                messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
                body = {"model": self.policy, "messages": messages, "stream": True, "max_tokens": self.max_tokens}
                self.replies.append(await stream_reply(api, body))
                await asyncio.sleep(rng.uniform(0, self.think))


async def stream_reply(
    api: httpx2.AsyncClient, body: dict[str, Any], headers: dict[str, str] | None = None
) -> ReplyRecord:
    requested_at = time.perf_counter()
    chunk_times, labels, finished, text = list[float](), set[str](), False, ""
    failure = id = None
    try:
        async with api.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            if response.status_code != 200:
                return ReplyRecord(requested_at, requested_at, 0.0, f"refused: {response.status_code}")
            id = response.headers.get("x-completion-id")
            labels |= {response.headers["x-policy-version"]} if "x-policy-version" in response.headers else set()
            async for line in response.aiter_lines():
                if not line.startswith(DATA) or line == f"{DATA}[DONE]":
                    continue
                chunk = orjson.loads(line[len(DATA) :])
                if "error" in chunk:
                    failure = f"reported: {chunk['error']['message']}"
                    continue
                labels.add(chunk["model"])
                for choice in chunk["choices"]:
                    finished |= choice["finish_reason"] in ("stop", "length")
                    if choice["delta"].get("content"):
                        text += choice["delta"]["content"]
                        chunk_times.append(time.perf_counter())
    except httpx2.HTTPError as error:
        failure = f"cut: {error!r}"
    chunk_times.append(time.perf_counter())
    largest_gap = max((after - before for before, after in pairwise(chunk_times)), default=0.0)
    if failure is None and not finished:
        failure = "cut: no finish reason"
    if failure is None and len(labels) > 1:
        failure = f"named {sorted(labels)}"
    return ReplyRecord(requested_at, chunk_times[0], largest_gap, failure, id, next(iter(labels), None), text)
