"""A deployment under test: its folder, its settings, and its processes, which can be killed one by one."""

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
from app.cli.server import prepare_database
from app.core.settings import Settings
from tests.faults.suite.fake_engine import LAUNCHER
from tests.faults.suite.fork_server_client import ForkServerClient
from tests.support.engine_fixture import free_port
from tests.support.settings import by_path, to_environment

KINDS = ("api", "worker", "judge", "rollout", "publisher", "trainer", "beat", "engine")
READY_SECONDS = 120.0
BACKOFF_SECONDS = 0.2  # before a process that ended by itself is started again
# The config of a base model without weights: nothing computes with it, and an adapter has a few kilobytes.
MODEL_CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 1024,
}


def make_settings(home: Path, *, judged: bool = False, **overrides: Any) -> Settings:
    """Return settings with four samples per batch, leases of 1.5 s, and two reconciler runs per second.

    With `judged`, a reward service also scores every reply, and one group sample of each.
    """
    model = home / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(MODEL_CONFIG))
    python = home / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {home}/launcher.py "$SGLANG_FAULTS_SOCKET" "$@"\n')
    python.chmod(0o755)
    (home / "launcher.py").write_text(LAUNCHER)
    engine_port = free_port()
    service = {"type": "http", "url": f"http://127.0.0.1:{engine_port}/reward", "window_seconds": 2.0}
    service |= {"timeout_seconds": 5.0, "per_hour": 10**6}
    values: dict[str, Any] = {
        "home": home,
        "rollouts": {
            "group_sampling": {"extra_replies": int(judged), "window_seconds": 4.0},
            "max_open_chats": 64,
            "in_flight": 4,
        },
        "rewards": {"sources": [{"type": "explicit"}, *([service] if judged else [])]},
        "policy": "shop",
        "model": str(model),
        "server__port": free_port(),
        "engine__port": engine_port,
        "engine__python": python,
        "batch_size": 4,
        "min_batch_size": 4,
        "lease_seconds": 1.5,
        "reconcile_seconds": 0.5,
        "chat_timeout_seconds": 2.0,
        "parity_check": False,  # the log-probs of a fake engine are those of no model
        "requests_per_minute": 10**6,
        # There are few users, so no trust is computed and no cap applies.
        "trust": False,
        "max_rater_share": 1.0,
        "max_conversation_share": 1.0,
        "max_cluster_share": 1.0,
        "max_rater_day": 10**6,
    }
    return Settings().replace(by_path(values | overrides))


@dataclass
class Deployment:
    """The processes of a deployment, which are restarted whenever they end.

    `switches` are environment variables by process kind. `desired_kinds` are the kinds that are restarted.
    """

    settings: Settings
    switches: dict[str, dict[str, str]] = field(default_factory=dict)
    fork_server: ForkServerClient | None = None  # shared with other deployments; None: one of its own
    pids: dict[str, int] = field(default_factory=dict)
    started_at: dict[str, float] = field(default_factory=dict)
    desired_kinds: set[str] = field(default_factory=set)
    kills: Counter[str] = field(default_factory=Counter)
    deaths: Counter[str] = field(default_factory=Counter)  # processes that ended without a kill
    _num_starting: int = 0  # requested, and not reported as started yet
    _killed_pids: set[int] = field(default_factory=set)
    _kinds: dict[int, str] = field(default_factory=dict)  # by pid

    async def __aenter__(self) -> "Deployment":
        await asyncio.to_thread(prepare_database, self.settings, lambda line: None)
        self.key = load_api_key(self.settings)
        self.logs = self.settings.home / "logs"
        self.logs.mkdir(exist_ok=True)
        fork_server = self.fork_server
        if fork_server is None:
            fork_server = await asyncio.to_thread(ForkServerClient.open)
        self._fork_server = fork_server
        self._unread = b""
        asyncio.get_running_loop().add_reader(self._fork_server.output, self._read_events)
        return self

    async def __aexit__(self, *error: object) -> None:
        self.desired_kinds.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(10):
                while self.pids or self._num_starting:
                    for pid in self.pids.values():
                        with suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                    await asyncio.sleep(0.02)
        asyncio.get_running_loop().remove_reader(self._fork_server.output)
        if self.fork_server is None:
            self._fork_server.close()

    async def start(self, *kinds: str) -> None:
        self.desired_kinds |= set(kinds)
        for kind in kinds:
            self._start(kind)
        async with asyncio.timeout(READY_SECONDS):
            while not set(kinds) <= self.pids.keys():
                await asyncio.sleep(0.01)

    async def wait_until_ready(self) -> None:
        """Wait until the API answers chats."""
        ends = time.monotonic() + READY_SECONDS
        async with httpx2.AsyncClient(base_url=self.settings.local_url, timeout=2, trust_env=False) as client:
            while True:
                with suppress(httpx2.TransportError):
                    answer = await client.get("/readyz")
                    if answer.status_code == 200:
                        return
                if time.monotonic() > ends:
                    raise TimeoutError(f"not ready; see {self.logs}")
                await asyncio.sleep(0.05)

    def kill(self, kind: str) -> bool:
        """Kill the process of this kind with SIGKILL. Return False if it is not running at this moment."""
        pid = self.pids.get(kind)
        if pid is None:
            return False
        self._killed_pids.add(pid)
        os.kill(pid, signal.SIGKILL)
        self.kills[kind] += 1
        return True

    def signal(self, kind: str, number: signal.Signals) -> None:
        os.kill(self.pids[kind], number)

    def _start(self, kind: str) -> None:
        self.started_at[kind] = time.monotonic()
        self._num_starting += 1
        variables = make_environment(self.settings) | self.switches.get(kind, {})
        self._fork_server.start(kind, self.logs / f"{kind}.log", variables)

    def _read_events(self) -> None:
        *lines, self._unread = (self._unread + os.read(self._fork_server.output, 65536)).split(b"\n")
        for line in lines:
            event = json.loads(line)
            if "started" in event:
                self._num_starting -= 1
                self.pids[event["started"]] = event["pid"]
                self._kinds[event["pid"]] = event["started"]
            elif (kind := self._kinds.pop(event["ended"], None)) is not None:
                del self.pids[kind]
                was_killed = event["ended"] in self._killed_pids
                self.deaths[kind] += not was_killed
                if kind in self.desired_kinds:
                    asyncio.get_running_loop().call_later(0 if was_killed else BACKOFF_SECONDS, self._restart, kind)

    def _restart(self, kind: str) -> None:
        if kind in self.desired_kinds:
            self._start(kind)


def make_environment(settings: Settings) -> dict[str, str]:
    """Return the environment variables for these settings."""
    return to_environment(settings) | {"OMP_NUM_THREADS": "1"}
