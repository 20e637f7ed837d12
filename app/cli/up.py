"""`attune up`: engine, API, workers, beat and trainer on one machine, watched; stopped in order."""

import asyncio
import sys
import time
from collections.abc import Callable

import httpx2

from app.cli import client
from app.cli.processes import Child, why_taken
from app.core.database import Database
from app.core.migrate import upgrade
from app.core.settings import Settings
from app.projects.bootstrap import bootstrap

Say = Callable[[str], None]
START_SECONDS = 600.0


def prepare(settings: Settings, say: Say) -> None:
    """The database at its newest schema, and what a first start makes."""
    settings.home.mkdir(parents=True, exist_ok=True)
    upgrade(settings.database)
    key = asyncio.run(_bootstrap(settings))
    if key is not None:
        client.save_key(settings, key)
        say(f"project 'default', API key (shown this once): {key}")


def refuse_taken_ports(settings: Settings) -> None:
    """Another service there would answer in this one's place. Raises ValueError."""
    for name, host, port in (
        ("ATTUNE_PORT", settings.host, settings.port),
        ("ATTUNE_ENGINE_PORT", settings.engine_host, settings.engine_port),
    ):
        if (reason := why_taken(host, port)) is not None:
            raise ValueError(f"{host}:{port} is taken ({reason}); is Attune up already? Or set {name}")


async def _bootstrap(settings: Settings) -> str | None:
    db = Database(settings.database)
    async with db.write() as session:
        key = await bootstrap(session, settings.policy, settings.model, settings.adaptation)
    await db.close()
    return key


def children(settings: Settings) -> list[Child]:
    """In the order they are stopped: first those who take work in, last those who do it."""
    python, logs = sys.executable, settings.logs_dir
    one_thread = {"OMP_NUM_THREADS": "1"}

    def child(name: str, *command: str, patience: float = 15.0) -> Child:
        return Child(name, [python, "-m", *command], logs / f"{name}.log", one_thread, patience)

    return [
        child("api", "app.cli.main", "serve"),
        child("beat", "workers.celery_app", "beat"),
        child("worker", "workers.celery_app", "attune"),
        child("judge", "workers.celery_app", "judge"),
        child("rollout", "workers.celery_app", "rollout"),
        child("publisher", "workers.celery_app", "publish"),
        child("trainer", "app.cli.main", "trainer"),
        child("engine", "workers.engine", patience=30.0),
    ]


class Up:
    def __init__(self, settings: Settings, say: Say) -> None:
        self.settings, self.say = settings, say
        self.children = children(settings)

    def __enter__(self) -> "Up":
        refuse_taken_ports(self.settings)
        prepare(self.settings, self.say)
        try:
            for child in reversed(self.children):
                child.start()
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _wait(self) -> None:
        started, told = time.monotonic(), 0.0
        while (trouble := self._trouble()) is not None:
            waited = time.monotonic() - started
            if waited > START_SECONDS:
                raise TimeoutError(f"not ready after {waited:.0f} s: {trouble}; see {self.settings.logs_dir}")
            if waited - told >= 5:
                told = waited
                self.say(f"starting, {waited:.0f} s: {trouble}")
            self.watch()
            time.sleep(0.25)
        self.say(
            f"ready at {self.settings.url} after {time.monotonic() - started:.0f} s; logs in {self.settings.logs_dir}"
        )

    def _trouble(self) -> str | None:
        try:
            answer = httpx2.get(f"{self.settings.url}/readyz", timeout=5, trust_env=False)
        except httpx2.TransportError:
            return "the API does not answer yet"
        return None if answer.status_code == 200 else str(answer.json()["error"]["message"])

    def watch(self) -> None:
        for child in self.children:
            if (news := child.revive()) is not None:
                self.say(news)

    def stop(self) -> None:
        try:
            self.say("stopping")
        finally:  # also when nobody is left to be told
            for child in self.children:
                child.stop()
        self.say("stopped")
