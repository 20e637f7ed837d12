"""Simulated users with hidden preferences, who chat over the public API and rate the replies."""

import argparse
import asyncio
import itertools
import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar, Protocol

import httpx2
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
    """A reply as the client received it. `versions`: as the response names them; all must be the same."""

    completion_id: str
    versions: list[str]
    text: str
    num_tokens: int
    finish_reason: str | None


@dataclass
class Rating:
    """What the user thinks of a reply. `at`: when it was received; `voted_at`: when a vote on it was accepted."""

    at: float
    version: str
    approved: bool
    voted_at: float | None = None


@dataclass
class ClientStats:
    """What the clients received.

    `refused`: an error in place of a reply; `incomplete`: a reply without a finish reason; `mislabelled`: a reply that
    names two versions. `votes`: feedback by value; `versions`: the version that each completion names; `approvals`:
    verdicts by version; `ratings`: the same verdicts in the order of the replies.
    """

    replies: int = 0
    refused: int = 0
    incomplete: int = 0
    mislabelled: int = 0
    votes: Counter[str] = field(default_factory=Counter)
    versions: dict[str, str] = field(default_factory=dict)
    approvals: defaultdict[str, list[bool]] = field(default_factory=lambda: defaultdict(list))
    ratings: list[Rating] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def failures(self) -> dict[str, int]:
        return {"refused": self.refused, "incomplete": self.incomplete, "mislabelled": self.mislabelled}


@dataclass(frozen=True)
class UserBehavior:
    """How simulated users behave.

    `think_seconds`: mean time to read and type; `unrated_share`: share of replies without feedback; `mistake_share`:
    share of mistaken votes; `streamed_share`: share of streamed replies; `leave_share`: share of replies after which
    the user leaves before the last question.
    """

    users: int = 24
    think_seconds: float = 1.0
    unrated_share: float = 0.1
    mistake_share: float = 0.01
    streamed_share: float = 0.25
    seed: int = 0
    leave_share: float = 0.0


class ReplyRefused(Exception):
    """The service answered with an error in place of a reply."""


class Person(Protocol):
    """One simulated user: the system message of the application, if any, and the questions of one conversation."""

    system: str | None

    def questions(self) -> Iterator[Question]: ...


class SimulatedUsers:
    """Concurrent simulated users. Each chats as one user after another, until `stop` is called.

    A subclass may have other people, judgement and sampling parameters.
    """

    sampling: ClassVar[dict[str, Any]] = {"max_tokens": 160}

    def __init__(self, settings: Settings, behavior: UserBehavior, policy: str | None = None) -> None:
        self.behavior, self.stats = behavior, ClientStats()
        self._model = policy or settings.policy
        self._stopping = asyncio.Event()
        self._user_seeds = itertools.count(HELD_OUT * (behavior.seed + 2))
        self._http = httpx2.AsyncClient(
            base_url=settings.local_url,
            headers={"authorization": f"Bearer {load_api_key(settings)}"},
            timeout=settings.server.chat_timeout_seconds,
            limits=httpx2.Limits(max_connections=behavior.users * 2),
            trust_env=False,
        )

    def make_person(self, seed: int) -> Person:
        return SimulatedUser(seed)

    def approves(self, question: Question, reply: Reply) -> bool:
        return judge(question, reply.text, reply.num_tokens).approved

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
            user, name = self.make_person(seed), f"user-{seed}"
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
        body = {"model": self._model, "messages": messages, **self.sampling, "user": user}
        try:
            reply = await (self._request_stream(body) if stream else self._request_completion(body))
        except (httpx2.TransportError, ReplyRefused) as error:
            self.stats.refused += 1
            self.stats.errors.append(f"{type(error).__name__}: {error}")
            return None
        self.stats.replies += 1
        self.stats.incomplete += reply.finish_reason not in FINISH_REASONS
        self.stats.mislabelled += len(set(reply.versions)) != 1
        return reply

    async def _request_completion(self, body: dict[str, Any]) -> Reply:
        response = await self._http.post("/v1/chat/completions", json=body)
        if response.status_code != 200:
            raise ReplyRefused(response.text)
        completion = response.json()
        choice = completion["choices"][0]
        versions = [completion["model"], response.headers["x-policy-version"]]
        num_tokens = completion["usage"]["completion_tokens"]
        return Reply(completion["id"], versions, choice["message"]["content"], num_tokens, choice["finish_reason"])

    async def _request_stream(self, body: dict[str, Any]) -> Reply:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        async with self._http.stream("POST", "/v1/chat/completions", json=body | options) as response:
            if response.status_code != 200:
                raise ReplyRefused((await response.aread()).decode())
            reply = Reply("", [response.headers["x-policy-version"]], "", 0, None)
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    self.stats.errors.append(chunk["error"]["message"])
                    continue
                reply.completion_id = chunk["id"]
                reply.versions.append(chunk["model"])
                reply.num_tokens = (chunk.get("usage") or {}).get("completion_tokens", reply.num_tokens)
                for choice in chunk["choices"]:
                    reply.text += choice["delta"].get("content") or ""
                    reply.finish_reason = choice["finish_reason"] or reply.finish_reason
        return reply

    async def _send_feedback(self, rng: Random, user: str, question: Question, reply: Reply) -> None:
        version = reply.versions[0]
        approved = self.approves(question, reply)
        rating = Rating(time.time(), version, approved)
        self.stats.ratings.append(rating)
        self.stats.approvals[version].append(approved)
        self.stats.versions[reply.completion_id] = version
        if rng.random() < self.behavior.unrated_share:
            return
        if rng.random() < self.behavior.mistake_share:
            approved = not approved
        vote = "up" if approved else "down"
        body = {
            "id": f"vote-{reply.completion_id}",
            "completion_id": reply.completion_id,
            "kind": "binary",
            "value": vote,
            "source": {"kind": "HUMAN", "id": user},
        }
        response = await self._http.post("/v1/feedback", json=body)
        if response.status_code == 201:
            self.stats.votes[vote] += 1
            rating.voted_at = time.time()
        else:
            self.stats.errors.append(response.text)


def summary_table(stats: ClientStats) -> Table:
    table = Table(title=f"{stats.replies} replies, votes: {dict(stats.votes)}, {stats.failures}")
    for name in ("version", "replies", "approved"):
        table.add_column(name, justify="left" if name == "version" else "right")
    for version, verdicts in sorted(stats.approvals.items(), key=lambda item: int(item[0].rpartition("@v")[2])):
        table.add_row(version, str(len(verdicts)), f"{sum(verdicts) / len(verdicts):.0%}")
    return table


async def simulate(settings: Settings, behavior: UserBehavior, seconds: float, policy: str | None) -> ClientStats:
    users = SimulatedUsers(settings, behavior, policy)
    task = asyncio.create_task(users.run())
    with Live(get_renderable=lambda: summary_table(users.stats), refresh_per_second=2):
        await asyncio.wait([task], timeout=seconds)
        users.stop()
        await task
    return users.stats


def main() -> None:
    parser = argparse.ArgumentParser(prog="attune simulate", description=__doc__)
    parser.add_argument("--users", type=int, default=UserBehavior.users)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    for name, help in {
        "unrated_share": "share of replies without feedback",
        "mistake_share": "share of mistaken votes",
        "streamed_share": "share of streamed replies",
        "think_seconds": "mean seconds between two messages",
    }.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=getattr(UserBehavior, name), help=help)
    parser.add_argument("--policy", default=None)
    args = vars(parser.parse_args())
    seconds, policy = args.pop("seconds"), args.pop("policy")
    stats = asyncio.run(simulate(get_settings(), UserBehavior(**args), seconds, policy))
    for error in stats.errors[:5]:
        print(error)


if __name__ == "__main__":
    main()
