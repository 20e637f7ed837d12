"""The load: users who chat and give feedback all the time, and repeat each request until it succeeds.

Every second user streams. A stream ends properly with `[DONE]`, after an error event if the reply failed.
"""

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx2

from tests.faults.suite.deployment import Deployment

TIMEOUT_SECONDS = 40.0  # longer than any limit under test, so that `longest_seconds` shows a request that hangs
RETRY_SECONDS = 0.05
RETRIED = (429, 502, 503)
CHAT = "/v1/chat/completions"


def chat_body(question: str) -> dict[str, Any]:
    return {"model": "shop", "messages": [{"role": "user", "content": question}], "max_tokens": 16}


@dataclass
class Load:
    """The users and their results.

    `acknowledged`: the turn of each acknowledged feedback, by feedback id. `errors`: responses that no fault explains.
    """

    deployment: Deployment
    seed: int
    users: int = 4
    pause: float = 0.1
    acknowledged: dict[str, str] = field(default_factory=dict)
    chats: set[str] = field(default_factory=set)
    statuses: Counter[str] = field(default_factory=Counter)
    streams: Counter[str] = field(default_factory=Counter)  # by end: done, error, cut
    errors: list[str] = field(default_factory=list)
    longest_seconds: float = 0.0  # of a request until its answer
    is_over: bool = False

    async def __aenter__(self) -> "Load":
        self._client = httpx2.AsyncClient(
            base_url=self.deployment.settings.local_url,
            headers={"authorization": f"Bearer {self.deployment.key}"},
            timeout=TIMEOUT_SECONDS,
            trust_env=False,
        )
        self._tasks = [asyncio.create_task(self._user(number)) for number in range(self.users)]
        return self

    async def __aexit__(self, *error: object) -> None:
        self.is_over = True
        done, unfinished = await asyncio.wait(self._tasks, timeout=30)
        for task in unfinished:
            task.cancel()
        await self._client.aclose()
        for task in done:
            if (failure := task.exception()) is not None:
                self.errors.append(f"a user's task failed: {failure!r}")

    async def _user(self, user: int) -> None:
        rng = random.Random(f"{self.seed}/{user}")
        number = 0
        while not self.is_over:
            number += 1
            question = f"{user}/{number}: what are your hours?"
            turn = await (self._chat_streaming(question) if user % 2 else self._chat(question))
            if turn is not None:
                await self._give_feedback(f"{self.seed}-{user}-{number}", turn, rng.random() < 0.5, rng)
            await asyncio.sleep(rng.uniform(0, 2 * self.pause))

    async def _chat(self, question: str) -> str | None:
        answer = await self._send_until(CHAT, chat_body(question), {200})
        if answer is None:
            return None
        turn: str = answer.json()["id"]
        self.chats.add(turn)
        return turn

    async def _chat_streaming(self, question: str) -> str | None:
        body = chat_body(question) | {"stream": True}
        while True:
            began, turn, is_failed, is_ended, name = time.monotonic(), "", False, False, "200"
            try:
                async with self._client.stream("POST", CHAT, json=body) as answer:
                    name = str(answer.status_code)
                    async for line in answer.aiter_lines():
                        is_ended = is_ended or line == "data: [DONE]"
                        if answer.status_code == 200 and line.startswith("data: {"):
                            chunk = json.loads(line.removeprefix("data: "))
                            is_failed = is_failed or "error" in chunk
                            turn = turn or chunk.get("id", "")
            except httpx2.TransportError as error:
                self.statuses[f"completions {type(error).__name__}"] += 1
                self.streams["cut"] += name == "200" and turn != ""
            else:
                self.longest_seconds = max(self.longest_seconds, time.monotonic() - began)
                if name == "200":
                    end = "cut" if not is_ended else "error" if is_failed else "done"
                    self.streams[end] += 1
                    name = "200" if end == "done" else f"stream {end}"
                self.statuses[f"completions {name}"] += 1
                if name == "200":
                    self.chats.add(turn)
                    return turn
                if name.isdigit() and int(name) not in RETRIED:
                    self.errors.append(f"{CHAT}: {name}")
                    return None
            if self.is_over:
                return None
            await asyncio.sleep(RETRY_SECONDS)

    async def _give_feedback(self, id: str, turn: str, is_up: bool, rng: random.Random) -> None:
        body: dict[str, Any] = {"id": id, "completion_id": turn, "kind": "binary", "value": is_up}
        body["source"] = {"kind": "HUMAN", "id": f"user-{rng.randrange(1000)}"}
        if await self._send_until("/v1/feedback", body, {200, 201}) is not None:
            self.acknowledged[id] = turn

    async def _send_until(self, path: str, body: dict[str, Any], statuses: set[int]) -> httpx2.Response | None:
        """Send until the answer has one of these statuses. Return it, or None if the load is over or it is an error."""
        name = path.rpartition("/")[2]
        while True:
            began = time.monotonic()
            try:
                answer = await self._client.post(path, json=body)
            except httpx2.TransportError as error:
                self.statuses[f"{name} {type(error).__name__}"] += 1
            else:
                self.longest_seconds = max(self.longest_seconds, time.monotonic() - began)
                self.statuses[f"{name} {answer.status_code}"] += 1
                if answer.status_code in statuses:
                    return answer
                if answer.status_code not in RETRIED:
                    self.errors.append(f"{path}: {answer.status_code} {answer.text[:300]}")
                    return None
            if self.is_over:
                return None
            await asyncio.sleep(RETRY_SECONDS)
