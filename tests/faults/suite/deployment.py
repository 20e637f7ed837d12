"""One deployment under test: its folder, its database and broker, its processes, and kill -9 for each of them."""

import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from app.cli.client import load_api_key
from app.cli.up import prepare_database
from app.core.settings import Settings
from tests.faults.suite.engine import LAUNCHER
from tests.faults.suite.nursery import Nursery
from tests.support.engine_fixture import free_port

KINDS = ("api", "worker", "judge", "rollout", "publisher", "trainer", "beat", "engine")
READY_SECONDS = 120.0
BACKOFF_SECONDS = 0.2  # of a process that ended by itself
# A base model in name: nobody computes with it, and an adapter of it is a few kilobytes.
TINY = {
    "model_type": "qwen2",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 1024,
}


def small(home: Path, *, judged: bool = False, **given: Any) -> Settings:
    """Four samples a batch, leases of a second and a half, a sweep twice a second.

    `judged`: beside what people say, a reward service is asked about every reply, and about a group sample of each.
    """
    model = home / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(TINY))
    python = home / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {home}/knock.py "$FAULTS_DOOR" "$@"\n')
    python.chmod(0o755)
    (home / "knock.py").write_text(LAUNCHER)
    engine_port = free_port()
    service = {"type": "http", "url": f"http://127.0.0.1:{engine_port}/reward", "window_seconds": 2.0}
    service |= {"timeout_seconds": 5.0, "per_hour": 10**6}
    settings = {
        "home": home,
        "rollouts": {
            "group_sampling": {"extra_replies": int(judged), "window_seconds": 4.0},
            "max_open_chats": 64,
            "in_flight": 4,
        },
        "rewards": {"sources": [{"type": "explicit"}, *([service] if judged else [])]},
        "policy": "shop",
        "model": str(model),
        "port": free_port(),
        "engine_port": engine_port,
        "engine_python": python,
        "batch_size": 4,
        "min_batch_size": 4,
        "lease_seconds": 1.5,
        "reconcile_seconds": 0.5,
        "chat_timeout_seconds": 2.0,
        "requests_per_minute": 10**6,
        # This suite is not about whom to believe: a handful of users are the whole world here.
        "trust": False,
        "max_rater_share": 1.0,
        "max_conversation_share": 1.0,
        "max_cluster_share": 1.0,
        "max_rater_day": 10**6,
    }
    return Settings(**(settings | given))


@dataclass
class Deployment:
    """`switches` of a kind are set in its environment; `wanted` kinds are started again whenever they end."""

    settings: Settings
    switches: dict[str, dict[str, str]] = field(default_factory=dict)
    nursery: Nursery | None = None  # its own if there is none
    pids: dict[str, int] = field(default_factory=dict)
    started_at: dict[str, float] = field(default_factory=dict)
    wanted: set[str] = field(default_factory=set)
    kills: Counter[str] = field(default_factory=Counter)
    deaths: Counter[str] = field(default_factory=Counter)  # those that were not our doing
    _ordered: int = 0  # of which nothing has been heard yet
    _ours: set[int] = field(default_factory=set)
    _lives: dict[int, str] = field(default_factory=dict)

    async def __aenter__(self) -> "Deployment":
        await asyncio.to_thread(prepare_database, self.settings, lambda said: None)
        self.key = load_api_key(self.settings)
        self.logs = self.settings.home / "logs"
        self.logs.mkdir(exist_ok=True)
        self._nursery = self.nursery or await asyncio.to_thread(Nursery.open)
        self._unread = b""
        asyncio.get_running_loop().add_reader(self._nursery.ear, self._hear)
        return self

    async def __aexit__(self, *error: object) -> None:
        self.wanted.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(10):
                while self.pids or self._ordered:
                    for pid in self.pids.values():
                        with suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                    await asyncio.sleep(0.02)
        asyncio.get_running_loop().remove_reader(self._nursery.ear)
        if self.nursery is None:
            self._nursery.close()

    async def start(self, *kinds: str) -> None:
        self.wanted |= set(kinds)
        for kind in kinds:
            self._order(kind)
        async with asyncio.timeout(READY_SECONDS):
            while not set(kinds) <= self.pids.keys():
                await asyncio.sleep(0.01)

    async def ready(self) -> None:
        """Until it answers chats."""
        ends = time.monotonic() + READY_SECONDS
        async with httpx2.AsyncClient(base_url=self.settings.url, timeout=2, trust_env=False) as client:
            while True:
                with suppress(httpx2.TransportError):
                    answer = await client.get("/readyz")
                    if answer.status_code == 200:
                        return
                if time.monotonic() > ends:
                    raise TimeoutError(f"not ready; see {self.logs}")
                await asyncio.sleep(0.05)

    def kill(self, kind: str) -> bool:
        """kill -9, of that process alone. False when it is not there at this moment."""
        pid = self.pids.get(kind)
        if pid is None:
            return False
        self._ours.add(pid)
        os.kill(pid, signal.SIGKILL)
        self.kills[kind] += 1
        return True

    def signal(self, kind: str, number: signal.Signals) -> None:
        os.kill(self.pids[kind], number)

    def _order(self, kind: str) -> None:
        self.started_at[kind] = time.monotonic()
        self._ordered += 1
        exported = environment(self.settings) | self.switches.get(kind, {})
        self._nursery.start(kind, self.logs / f"{kind}.log", exported)

    def _hear(self) -> None:
        *lines, self._unread = (self._unread + os.read(self._nursery.ear, 65536)).split(b"\n")
        for line in lines:
            told = json.loads(line)
            if "started" in told:
                self._ordered -= 1
                self.pids[told["started"]] = told["pid"]
                self._lives[told["pid"]] = told["started"]
            elif (kind := self._lives.pop(told["ended"], None)) is not None:
                del self.pids[kind]
                ours = told["ended"] in self._ours
                self.deaths[kind] += not ours
                if kind in self.wanted:
                    asyncio.get_running_loop().call_later(0 if ours else BACKOFF_SECONDS, self._again, kind)

    def _again(self, kind: str) -> None:
        if kind in self.wanted:
            self._order(kind)


def environment(settings: Settings) -> dict[str, str]:
    """What a person would export for these settings."""
    given = settings.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    given["rewards"] = settings.rewards.model_dump(mode="json")  # a source's type is a default too
    exported = {
        f"ATTUNE_{name.upper()}": json.dumps(value) if isinstance(value, (list, dict, bool)) else str(value)
        for name, value in given.items()
    }
    return exported | {"OMP_NUM_THREADS": "1"}
