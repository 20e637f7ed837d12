"""Users who chat and judge all the time, under ids of their own, again and again until they are answered."""

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx2

from tests.faults.suite.deployment import Deployment

PATIENCE_SECONDS = 20.0  # longer than any bound of ours: who hangs is seen by the time it took
AGAIN_SECONDS = 0.05


@dataclass
class Load:
    """`acked`: what was acknowledged, by feedback id, with its turn. `wrong`: answers that nothing excuses."""

    deployment: Deployment
    seed: int
    users: int = 4
    pause: float = 0.1
    acked: dict[str, str] = field(default_factory=dict)
    chats: set[str] = field(default_factory=set)
    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    feedback_during_down: int = 0
    latest: float = 0.0  # the longest that an answer took
    over: bool = False

    async def __aenter__(self) -> "Load":
        self._client = httpx2.AsyncClient(
            base_url=self.deployment.settings.url,
            headers={"authorization": f"Bearer {self.deployment.key}"},
            timeout=PATIENCE_SECONDS,
            trust_env=False,
        )
        self._tasks = [asyncio.create_task(self._user(number)) for number in range(self.users)]
        return self

    async def __aexit__(self, *error: object) -> None:
        self.over = True
        done, left = await asyncio.wait(self._tasks, timeout=30)
        for task in left:
            task.cancel()
        await self._client.aclose()
        for task in done:
            if (broken := task.exception()) is not None:
                self.wrong.append(f"a user broke: {broken!r}")

    async def _user(self, user: int) -> None:
        rng = random.Random(f"{self.seed}/{user}")
        number = 0
        while not self.over:
            number += 1
            turn = await self._chat(f"{user}/{number}: what are your hours?")
            if turn is not None:
                await self._say(f"{self.seed}-{user}-{number}", turn, rng.random() < 0.5, rng)
            await asyncio.sleep(rng.uniform(0, 2 * self.pause))

    async def _chat(self, words: str) -> str | None:
        body = {"model": "shop", "messages": [{"role": "user", "content": words}], "max_tokens": 16}
        answer = await self._until("/v1/chat/completions", body, {200})
        if answer is None:
            return None
        turn: str = answer.json()["id"]
        self.chats.add(turn)
        return turn

    async def _say(self, id: str, turn: str, up: bool, rng: random.Random) -> None:
        body: dict[str, Any] = {"id": id, "completion_id": turn, "kind": "binary", "value": up}
        body["source"] = {"kind": "HUMAN", "id": f"user-{rng.randrange(1000)}"}
        if await self._until("/v1/feedback", body, {200, 201}) is not None:
            self.acked[id] = turn

    async def _until(self, path: str, body: dict[str, Any], good: set[int]) -> httpx2.Response | None:
        """Its good answer; None when the load is over first, or when the answer was wrong."""
        what = path.rpartition("/")[2]
        while True:
            began = time.monotonic()
            try:
                answer = await self._client.post(path, json=body)
            except httpx2.TransportError as error:
                self.statuses[f"{what} {type(error).__name__}"] += 1
            else:
                self.latest = max(self.latest, time.monotonic() - began)
                self.statuses[f"{what} {answer.status_code}"] += 1
                if answer.status_code in good:
                    return answer
                if answer.status_code not in (429, 502, 503):
                    self.wrong.append(f"{path}: {answer.status_code} {answer.text[:300]}")
                    return None
            if self.over:
                return None
            await asyncio.sleep(AGAIN_SECONDS)
