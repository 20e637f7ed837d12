"""Simulated agents whose chats are episodes of several turns, which releases come in between."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import cycle

import httpx2

from demo.dialogues import HELD_OUT, SYSTEM, SimulatedUser
from tests.benchmarks.swap_users import Users, stream_reply

RULES = ("follow", "leash", "pin")  # which version answers after the first chat; docs/episodes.md
TURNS = 6
LEFT = "left the version that its episode is pinned to"


@dataclass
class Agents(Users):
    """Users who play one episode after another.

    `episodes` counts those that have ended by rule; `mixed` those of them that several versions have answered.
    """

    episodes: Counter[str] = field(default_factory=Counter)
    mixed: Counter[str] = field(default_factory=Counter)

    async def _user(self, url: str, rng: random.Random) -> None:
        headers = {"authorization": f"Bearer {self.key}"}
        rules = cycle(rng.sample(RULES, len(RULES)))
        async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=60, trust_env=False) as api:
            while not self.stopped:
                await self._play(api, rng, next(rules))

    async def _play(self, api: httpx2.AsyncClient, rng: random.Random, rule: str) -> None:
        """Play one episode, to its end also when the agents are stopped meanwhile."""
        created = await api.post("/v1/episodes", json={"policy": self.policy, "version": rule, "sampling": "policy"})
        created.raise_for_status()
        episode = created.json()
        headers = {"authorization": f"Bearer {episode['api_key']}"}
        messages = [{"role": "system", "content": SYSTEM}]
        labels: list[str | None] = []
        for _ in range(TURNS):
            question = next(SimulatedUser(HELD_OUT + rng.randrange(100_000)).questions()).text
            messages.append({"role": "user", "content": question})
            body = {"model": self.policy, "messages": messages, "stream": True, "max_tokens": self.max_tokens}
            reply = await stream_reply(api, body, headers)
            labels.append(reply.label)
            if rule == "pin" and reply.failure is None and reply.label != labels[0]:
                reply = replace(reply, failure=LEFT)
            self.replies.append(reply)
            messages.append({"role": "assistant", "content": reply.text})
            await asyncio.sleep(rng.uniform(0, self.think))
        ended = await api.post(f"/v1/episodes/{episode['id']}/end", json={"outcome": rng.choice((-1, 1))})
        ended.raise_for_status()
        self.episodes[rule] += 1
        self.mixed[rule] += len(set(labels)) > 1

    def summarize(self) -> str:
        rows = (f"{self.episodes[rule]} {rule} ({self.mixed[rule]} answered by several versions)" for rule in RULES)
        return f"episodes of {TURNS} chats: {', '.join(rows)}"
