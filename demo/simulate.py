"""Simulated users with hidden preferences, who chat over the public API and rate the replies."""

import argparse
import asyncio
import itertools
import json
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx2
from rich.console import Console
from rich.live import Live
from rich.table import Table

from app.cli.client import load_api_key
from app.core.settings import Settings, get_settings
from demo.dialogues import HELD_OUT, SimulatedUser
from demo.shop import Question
from demo.user_preferences import judge

FINISH_REASONS = ("stop", "length")


@dataclass
class Reply:
    """A reply as the client received it. `version` is the version that the response names."""

    completion_id: str
    version: str
    text: str
    num_tokens: int


@dataclass
class ClientStats:
    """What the clients received.

    `refused`: an error in place of a reply; `incomplete`: a reply without a finish reason; `mislabelled`: a reply that
    names two versions. `versions`: the version that each completion names; `approvals`: verdicts by version.
    """

    replies: int = 0
    refused: int = 0
    incomplete: int = 0
    mislabelled: int = 0
    thumbs: Counter[str] = field(default_factory=Counter)
    versions: dict[str, str] = field(default_factory=dict)
    approvals: defaultdict[str, list[bool]] = field(default_factory=lambda: defaultdict(list))
    errors: list[str] = field(default_factory=list)

    @property
    def failures(self) -> dict[str, int]:
        return {"refused": self.refused, "incomplete": self.incomplete, "mislabelled": self.mislabelled}


@dataclass(frozen=True)
class UserBehavior:
    """How simulated users behave.

    `think_seconds`: mean time to read and type; `unrated_share`: share of replies without feedback; `mistake_share`:
    share of wrong thumbs; `streamed_share`: share of streamed replies; `leave_share`: share of replies after which the
    user leaves before the last question.
    """

    users: int = 24
    think_seconds: float = 1.0
    unrated_share: float = 0.1
    mistake_share: float = 0.01
    streamed_share: float = 0.25
    seed: int = 0
    leave_share: float = 0.0


class SimulatedUsers:
    """Concurrent simulated users. Each chats as one user after another, until `stop` is called."""

    def __init__(self, settings: Settings, behavior: UserBehavior, policy: str | None = None) -> None:
        self.behavior, self.stats = behavior, ClientStats()
        self._model = policy or settings.policy
        self._stopping = asyncio.Event()
        self._user_seeds = itertools.count(HELD_OUT * (behavior.seed + 2))
        self._http = httpx2.AsyncClient(
            base_url=settings.url,
            headers={"authorization": f"Bearer {load_api_key(settings)}"},
            timeout=settings.chat_timeout_seconds,
            limits=httpx2.Limits(max_connections=behavior.users * 2),
            trust_env=False,
        )

    def stop(self) -> None:
        self._stopping.set()

    async def run(self) -> None:
        """Chat until `stop` is called. Every user finishes the current reply."""
        try:
            await asyncio.gather(*[self._run_user(number) for number in range(self.behavior.users)])
        finally:
            await self._http.aclose()

    async def _run_user(self, number: int) -> None:
        rng = Random(f"user {self.behavior.seed} {number}")
        while not self._stopping.is_set():
            seed = next(self._user_seeds)
            user, name = SimulatedUser(seed), f"shopper-{seed}"
            messages = [{"role": "system", "content": user.system}] if user.system else []
            for question in user.questions():
                messages.append({"role": "user", "content": question.text})
                reply = await self._request_reply(name, messages, rng.random() < self.behavior.streamed_share)
                if reply is None or self._stopping.is_set():
                    break
                messages.append({"role": "assistant", "content": reply.text})
                await self._send_feedback(rng, name, question, reply)
                await asyncio.sleep(rng.expovariate(1 / self.behavior.think_seconds))
                if rng.random() < self.behavior.leave_share:
                    break

    async def _request_reply(self, user: str, messages: list[dict[str, str]], stream: bool) -> Reply | None:
        body = {"model": self._model, "messages": messages, "max_tokens": 160, "user": user}
        try:
            return await (self._request_stream(body) if stream else self._request_completion(body))
        except httpx2.TransportError as error:
            self._record_refusal(f"{type(error).__name__}: {error}")
            return None

    async def _request_completion(self, body: dict[str, Any]) -> Reply | None:
        response = await self._http.post("/v1/chat/completions", json=body)
        if response.status_code != 200:
            self._record_refusal(response.text)
            return None
        completion = response.json()
        choice = completion["choices"][0]
        self._record_reply([completion["model"], response.headers["x-policy-version"]], choice["finish_reason"])
        num_tokens = completion["usage"]["completion_tokens"]
        return Reply(completion["id"], completion["model"], choice["message"]["content"], num_tokens)

    async def _request_stream(self, body: dict[str, Any]) -> Reply | None:
        versions: list[str] = []
        text, finish_reason, completion_id, num_tokens = "", None, "", 0
        options = {"stream": True, "stream_options": {"include_usage": True}}
        async with self._http.stream("POST", "/v1/chat/completions", json=body | options) as response:
            if response.status_code != 200:
                await response.aread()
                self._record_refusal(response.text)
                return None
            versions.append(response.headers["x-policy-version"])
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    self.stats.errors.append(chunk["error"]["message"])
                    continue
                completion_id = chunk["id"]
                versions.append(chunk["model"])
                num_tokens = (chunk.get("usage") or {}).get("completion_tokens", num_tokens)
                for choice in chunk["choices"]:
                    text += choice["delta"].get("content") or ""
                    finish_reason = choice["finish_reason"] or finish_reason
        self._record_reply(versions, finish_reason)
        return Reply(completion_id, versions[0], text, num_tokens)

    def _record_refusal(self, error: str) -> None:
        self.stats.refused += 1
        self.stats.errors.append(error)

    def _record_reply(self, versions: list[str], finish_reason: str | None) -> None:
        self.stats.replies += 1
        self.stats.incomplete += finish_reason not in FINISH_REASONS
        self.stats.mislabelled += len(set(versions)) != 1

    async def _send_feedback(self, rng: Random, user: str, question: Question, reply: Reply) -> None:
        approved = judge(question, reply.text, reply.num_tokens).approved
        self.stats.approvals[reply.version].append(approved)
        self.stats.versions[reply.completion_id] = reply.version
        if rng.random() < self.behavior.unrated_share:
            return
        if rng.random() < self.behavior.mistake_share:
            approved = not approved
        thumb = "up" if approved else "down"
        body = {
            "id": f"thumb-{reply.completion_id}",
            "completion_id": reply.completion_id,
            "kind": "binary",
            "value": thumb,
            "source": {"kind": "HUMAN", "id": user},
        }
        response = await self._http.post("/v1/feedback", json=body)
        if response.status_code == 201:
            self.stats.thumbs[thumb] += 1
        else:
            self.stats.errors.append(response.text)


def summary_table(stats: ClientStats) -> Table:
    table = Table(title=f"{stats.replies} replies, thumbs: {dict(stats.thumbs)}, {stats.failures}")
    for name in ("version", "replies", "approved"):
        table.add_column(name, justify="left" if name == "version" else "right")
    for version, verdicts in sorted(stats.approvals.items(), key=lambda item: int(item[0].rpartition("@v")[2])):
        table.add_row(version, str(len(verdicts)), f"{sum(verdicts) / len(verdicts):.0%}")
    return table


async def simulate(settings: Settings, behavior: UserBehavior, seconds: float, policy: str | None) -> ClientStats:
    users = SimulatedUsers(settings, behavior, policy)
    task = asyncio.create_task(users.run())
    end = time.monotonic() + seconds
    with Live(summary_table(users.stats), console=Console(), refresh_per_second=2) as live:
        while time.monotonic() < end and not task.done():
            await asyncio.sleep(0.5)
            live.update(summary_table(users.stats))
        users.stop()
        await task
        live.update(summary_table(users.stats))
    return users.stats


def main() -> None:
    parser = argparse.ArgumentParser(prog="attune simulate", description=__doc__)
    parser.add_argument("--users", type=int, default=UserBehavior.users)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--unrated-share", type=float, default=UserBehavior.unrated_share, help="share of replies without feedback"
    )
    parser.add_argument("--mistake-share", type=float, default=UserBehavior.mistake_share, help="share of wrong thumbs")
    parser.add_argument(
        "--streamed-share", type=float, default=UserBehavior.streamed_share, help="share of streamed replies"
    )
    parser.add_argument(
        "--think-seconds", type=float, default=UserBehavior.think_seconds, help="mean seconds between two messages"
    )
    parser.add_argument("--policy", default=None)
    args = parser.parse_args()
    behavior = UserBehavior(
        args.users, args.think_seconds, args.unrated_share, args.mistake_share, args.streamed_share, args.seed
    )
    stats = asyncio.run(simulate(get_settings(), behavior, args.seconds, args.policy))
    for error in stats.errors[:5]:
        print(error)


if __name__ == "__main__":
    main()
