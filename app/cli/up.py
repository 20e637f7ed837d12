"""`attune up`: engine, API, workers, beat and trainer on one machine, restarted when they exit and stopped in order."""

import asyncio
import sys
import time
from collections.abc import Callable

import httpx2

from app.cli import client
from app.core.database import Database
from app.core.migrate import upgrade
from app.core.processes import ManagedProcess, port_error
from app.core.settings import Settings
from app.projects.bootstrap import bootstrap

PrintLine = Callable[[str], None]
START_TIMEOUT_SECONDS = 600.0


def prepare_database(settings: Settings, print_line: PrintLine) -> None:
    """Migrate the database to the newest schema. At the first start, create the default project and its API key."""
    settings.home.mkdir(parents=True, exist_ok=True)
    upgrade(settings.database)
    key = asyncio.run(_bootstrap(settings))
    if key is not None:
        client.save_api_key(settings, key)
        print_line(f"project 'default', API key (shown this once): {key}")


def check_ports_are_free(settings: Settings) -> None:
    """Raise ValueError if another process listens on our ports: it would answer in place of this service."""
    for name, host, port in (
        ("ATTUNE_PORT", settings.host, settings.port),
        ("ATTUNE_ENGINE_PORT", settings.engine_host, settings.engine_port),
    ):
        if (reason := port_error(host, port)) is not None:
            raise ValueError(f"{host}:{port} is taken ({reason}); is Attune already running? Otherwise set {name}")


async def _bootstrap(settings: Settings) -> str | None:
    db = Database(settings.database)
    async with db.write() as session:
        key = await bootstrap(session, settings.policy, settings.model, settings.adaptation)
    await db.close()
    return key


def build_processes(settings: Settings) -> list[ManagedProcess]:
    """Return the processes in the order in which they are stopped: first those that accept work."""
    python, logs = sys.executable, settings.logs_dir
    one_thread = {"OMP_NUM_THREADS": "1"}

    def process(name: str, *command: str, stop_timeout: float = 15.0) -> ManagedProcess:
        return ManagedProcess(name, [python, "-m", *command], logs / f"{name}.log", one_thread, stop_timeout)

    return [
        process("api", "app.cli.main", "serve"),
        process("beat", "workers.celery_app", "beat"),
        process("worker", "workers.celery_app", "attune"),
        process("judge", "workers.celery_app", "judge"),
        process("rollout", "workers.celery_app", "rollout"),
        process("publisher", "workers.celery_app", "publish"),
        process("trainer", "app.cli.main", "trainer"),
        process("engine", "workers.engine", stop_timeout=30.0),
    ]


class LocalDeployment:
    """A context manager that runs the whole service: on entry it waits until all is ready, on exit it stops all."""

    def __init__(self, settings: Settings, print_line: PrintLine) -> None:
        self.settings, self.print_line = settings, print_line
        self.processes = build_processes(settings)

    def __enter__(self) -> "LocalDeployment":
        check_ports_are_free(self.settings)
        prepare_database(self.settings, self.print_line)
        try:
            for process in reversed(self.processes):
                process.start()
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _wait_until_ready(self) -> None:
        started, last_message_at = time.monotonic(), 0.0
        while (problem := self._readiness_problem()) is not None:
            waited = time.monotonic() - started
            if waited > START_TIMEOUT_SECONDS:
                raise TimeoutError(f"not ready after {waited:.0f} s: {problem}; see {self.settings.logs_dir}")
            if waited - last_message_at >= 5:
                last_message_at = waited
                self.print_line(f"starting, {waited:.0f} s: {problem}")
            self.restart_dead_processes()
            time.sleep(0.25)
        waited = time.monotonic() - started
        self.print_line(f"ready at {self.settings.url} after {waited:.0f} s; logs in {self.settings.logs_dir}")

    def _readiness_problem(self) -> str | None:
        try:
            response = httpx2.get(f"{self.settings.url}/readyz", timeout=5, trust_env=False)
        except httpx2.TransportError:
            return "the API does not respond yet"
        return None if response.status_code == 200 else str(response.json()["error"]["message"])

    def restart_dead_processes(self) -> None:
        for process in self.processes:
            if (message := process.restart_if_dead()) is not None:
                self.print_line(message)

    def stop(self) -> None:
        try:
            self.print_line("stopping")
        finally:  # also when the output is closed
            for process in self.processes:
                process.stop()
        self.print_line("stopped")
