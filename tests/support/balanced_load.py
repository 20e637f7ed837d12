"""Load: clients of several API processes that come and go, behind a load balancer."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx2
import orjson

from tests.support.processes import until

CLIENTS = 12
SECONDS = 120.0


class RequestFailed(Exception):
    """A request was refused, or its reply was cut."""


@dataclass
class Load:
    """Clients behind a load balancer that sends requests to the API processes whose /readyz was 200 just now.

    With `votes` each client votes on every reply, through another API process if there is one.
    """

    urls: list[str]
    key: str
    votes: bool = False
    ready: set[str] = field(default_factory=set)
    replies: Counter[str] = field(default_factory=Counter)  # by API process
    failures: list[str] = field(default_factory=list)
    longest: float = 0.0
    completion_ids: set[str] = field(default_factory=set)  # of whole replies
    feedback_ids: set[str] = field(default_factory=set)  # of acknowledged votes

    async def poll_readiness(self, url: str) -> None:
        async with httpx2.AsyncClient(base_url=url, timeout=5, trust_env=False) as client:
            while True:
                try:
                    is_ready = (await client.get("/readyz")).status_code == 200
                except httpx2.TransportError:
                    is_ready = False
                (self.ready.add if is_ready else self.ready.discard)(url)
                await asyncio.sleep(0.05)

    async def chat_forever(self, number: int) -> None:
        headers = {"authorization": f"Bearer {self.key}"}
        async with httpx2.AsyncClient(headers=headers, timeout=60, trust_env=False) as client:
            turn = 0
            while True:
                turn, began = turn + 1, time.monotonic()
                try:
                    url = self._choose(number + turn)
                    completion_id = await self._chat(client, url, f"Question {number}-{turn}", stream=turn % 2 == 0)
                    if self.votes:
                        await self._vote(client, self._choose(number + turn + 1), completion_id)
                    self.replies[url] += 1
                except (RequestFailed, httpx2.TransportError) as error:
                    self.failures.append(f"{type(error).__name__}: {error}")
                    await asyncio.sleep(0.1)
                self.longest = max(self.longest, time.monotonic() - began)

    def _choose(self, number: int) -> str:
        """Return the address of a ready process."""
        if not self.ready:
            raise RequestFailed("no API process is ready")
        return sorted(self.ready)[number % len(self.ready)]

    async def _chat(self, client: httpx2.AsyncClient, url: str, question: str, *, stream: bool) -> str:
        """Return the id of a whole reply."""
        body = {"model": "shop", "messages": [{"role": "user", "content": question}], "stream": stream}
        response = await client.post(f"{url}/v1/chat/completions", json=body)
        if response.status_code != 200:
            raise RequestFailed(f"{response.status_code}: {response.text}")
        if stream:
            is_whole = response.text.endswith("data: [DONE]\n\n") and '"error"' not in response.text
        else:
            is_whole = orjson.loads(response.content)["choices"][0]["finish_reason"] == "stop"
        if not is_whole:
            raise RequestFailed(response.text)
        completion_id: str = response.headers["x-completion-id"]
        self.completion_ids.add(completion_id)
        return completion_id

    async def _vote(self, client: httpx2.AsyncClient, url: str, completion_id: str) -> None:
        body = {"completion_id": completion_id, "kind": "binary", "value": "up"}
        response = await client.post(f"{url}/v1/feedback", json=body)
        if response.status_code != 201:
            raise RequestFailed(f"{response.status_code}: {response.text}")
        self.feedback_ids.add(orjson.loads(response.content)["id"])

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Send requests inside the block, which begins when a process is ready."""
        tasks = [asyncio.create_task(self.poll_readiness(url)) for url in self.urls]
        await until(lambda: _done(self.ready), SECONDS, "an API process is ready")
        tasks += [asyncio.create_task(self.chat_forever(number)) for number in range(CLIENTS)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def wait_for_ready(self, count: int) -> None:
        await until(lambda: _done(len(self.ready) == count), SECONDS, f"{count} API processes are ready")

    async def wait_for_replies(self, count: int = 20, url: str | None = None) -> None:
        """Wait for so many more replies, of this process if one is named. Fails with the first failed request."""

        def num_replies() -> int:
            assert self.failures == [], self.failures[:3]
            return self.replies.total() if url is None else self.replies[url]

        target = num_replies() + count
        await until(lambda: _done(num_replies() >= target), SECONDS, f"{target} replies")


async def _done(value: object) -> object:
    return value
