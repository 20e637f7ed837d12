"""Users with hidden tastes: they chat over the public API, judge what they get, and go on while the service learns."""

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

from app.cli.client import saved_key
from app.core.settings import Settings, get_settings
from demo.dialogues import HELD_OUT, Shopper
from demo.shop import Question
from demo.user_preferences import judge

ENDINGS = ("stop", "length")


@dataclass
class Reply:
    """One reply as the user's client saw it."""

    completion_id: str
    label: str
    text: str
    num_tokens: int


@dataclass
class Tally:
    """What the users saw. `refused`: no reply came; `cut`: it had no end; `mislabelled`: it named two versions.
    `named`: the version that each completion named."""

    replies: int = 0
    refused: int = 0
    cut: int = 0
    mislabelled: int = 0
    thumbs: Counter[str] = field(default_factory=Counter)
    named: dict[str, str] = field(default_factory=dict)
    approved: defaultdict[str, list[bool]] = field(default_factory=lambda: defaultdict(list))
    troubles: list[str] = field(default_factory=list)

    @property
    def seen(self) -> dict[str, int]:
        return {"refused": self.refused, "cut": self.cut, "mislabelled": self.mislabelled}


@dataclass(frozen=True)
class Habits:
    """How a crowd behaves: who keeps silent, who presses the wrong thumb, who streams, who leaves after a reply that
    is not the last one; seconds to read and type."""

    users: int = 24
    think: float = 1.0
    silent: float = 0.1
    slips: float = 0.01
    streams: float = 0.25
    seed: int = 0
    leaves: float = 0.0


class Crowd:
    def __init__(self, settings: Settings, habits: Habits, policy: str | None = None) -> None:
        self.habits, self.tally = habits, Tally()
        self._model = policy or settings.policy
        self._stopping = asyncio.Event()
        self._shoppers = itertools.count(HELD_OUT * (habits.seed + 2))
        self._http = httpx2.AsyncClient(
            base_url=settings.url,
            headers={"authorization": f"Bearer {saved_key(settings)}"},
            timeout=settings.chat_timeout_seconds,
            limits=httpx2.Limits(max_connections=habits.users * 2),
            trust_env=False,
        )

    def stop(self) -> None:
        self._stopping.set()

    async def run(self) -> None:
        """Until told to stop; every user finishes the reply that is under way."""
        try:
            await asyncio.gather(*[self._user(number) for number in range(self.habits.users)])
        finally:
            await self._http.aclose()

    async def _user(self, number: int) -> None:
        rng = Random(f"user {self.habits.seed} {number}")
        while not self._stopping.is_set():
            customer = next(self._shoppers)
            shopper, name = Shopper(customer), f"shopper-{customer}"
            messages = [{"role": "system", "content": shopper.system}] if shopper.system else []
            for question in shopper.questions():
                messages.append({"role": "user", "content": question.text})
                reply = await self._ask(name, messages, rng.random() < self.habits.streams)
                if reply is None or self._stopping.is_set():
                    break
                messages.append({"role": "assistant", "content": reply.text})
                await self._judge(rng, name, question, reply)
                await asyncio.sleep(rng.expovariate(1 / self.habits.think))
                if rng.random() < self.habits.leaves:
                    break

    async def _ask(self, user: str, messages: list[dict[str, str]], stream: bool) -> Reply | None:
        body = {"model": self._model, "messages": messages, "max_tokens": 160, "user": user}
        try:
            return await (self._streamed(body) if stream else self._whole(body))
        except httpx2.TransportError as error:
            self._refused(f"{type(error).__name__}: {error}")
            return None

    async def _whole(self, body: dict[str, Any]) -> Reply | None:
        answer = await self._http.post("/v1/chat/completions", json=body)
        if answer.status_code != 200:
            self._refused(answer.text)
            return None
        completion = answer.json()
        choice = completion["choices"][0]
        self._seen([completion["model"], answer.headers["x-policy-version"]], choice["finish_reason"])
        tokens = completion["usage"]["completion_tokens"]
        return Reply(completion["id"], completion["model"], choice["message"]["content"], tokens)

    async def _streamed(self, body: dict[str, Any]) -> Reply | None:
        labels: list[str] = []
        text, ending, completion_id, tokens = "", None, "", 0
        options = {"stream": True, "stream_options": {"include_usage": True}}
        async with self._http.stream("POST", "/v1/chat/completions", json=body | options) as answer:
            if answer.status_code != 200:
                await answer.aread()
                self._refused(answer.text)
                return None
            labels.append(answer.headers["x-policy-version"])
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    self.tally.troubles.append(chunk["error"]["message"])
                    continue
                completion_id = chunk["id"]
                labels.append(chunk["model"])
                tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
                for choice in chunk["choices"]:
                    text += choice["delta"].get("content") or ""
                    ending = choice["finish_reason"] or ending
        self._seen(labels, ending)
        return Reply(completion_id, labels[0], text, tokens)

    def _refused(self, trouble: str) -> None:
        self.tally.refused += 1
        self.tally.troubles.append(trouble)

    def _seen(self, labels: list[str], ending: str | None) -> None:
        self.tally.replies += 1
        self.tally.cut += ending not in ENDINGS
        self.tally.mislabelled += len(set(labels)) != 1

    async def _judge(self, rng: Random, user: str, question: Question, reply: Reply) -> None:
        approved = judge(question, reply.text, reply.num_tokens).approved
        self.tally.approved[reply.label].append(approved)
        self.tally.named[reply.completion_id] = reply.label
        if rng.random() < self.habits.silent:
            return
        if rng.random() < self.habits.slips:
            approved = not approved
        thumb = "up" if approved else "down"
        body = {
            "id": f"thumb-{reply.completion_id}",
            "completion_id": reply.completion_id,
            "kind": "binary",
            "value": thumb,
            "source": {"kind": "HUMAN", "id": user},
        }
        answer = await self._http.post("/v1/feedback", json=body)
        if answer.status_code == 201:
            self.tally.thumbs[thumb] += 1
        else:
            self.tally.troubles.append(answer.text)


def summary(tally: Tally) -> Table:
    table = Table(title=f"{tally.replies} replies, thumbs: {dict(tally.thumbs)}, {tally.seen}")
    for name in ("version", "replies", "approved"):
        table.add_column(name, justify="left" if name == "version" else "right")
    for label, verdicts in sorted(tally.approved.items(), key=lambda item: int(item[0].rpartition("@v")[2])):
        table.add_row(label, str(len(verdicts)), f"{sum(verdicts) / len(verdicts):.0%}")
    return table


async def simulate(settings: Settings, habits: Habits, seconds: float, policy: str | None) -> Tally:
    crowd = Crowd(settings, habits, policy)
    running = asyncio.create_task(crowd.run())
    ends = time.monotonic() + seconds
    with Live(summary(crowd.tally), console=Console(), refresh_per_second=2) as live:
        while time.monotonic() < ends and not running.done():
            await asyncio.sleep(0.5)
            live.update(summary(crowd.tally))
        crowd.stop()
        await running
        live.update(summary(crowd.tally))
    return crowd.tally


def main() -> None:
    parser = argparse.ArgumentParser(prog="attune simulate", description=__doc__)
    parser.add_argument("--users", type=int, default=Habits.users)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--silent", type=float, default=Habits.silent, help="share of replies that nobody judges")
    parser.add_argument("--slips", type=float, default=Habits.slips, help="share of thumbs pressed by mistake")
    parser.add_argument("--streams", type=float, default=Habits.streams, help="share of replies that are streamed")
    parser.add_argument("--think", type=float, default=Habits.think, help="mean seconds between two messages")
    parser.add_argument("--policy", default=None)
    asked = parser.parse_args()
    habits = Habits(asked.users, asked.think, asked.silent, asked.slips, asked.streams, asked.seed)
    tally = asyncio.run(simulate(get_settings(), habits, asked.seconds, asked.policy))
    for trouble in tally.troubles[:5]:
        print(trouble)


if __name__ == "__main__":
    main()
