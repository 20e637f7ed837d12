"""Attune's processes, run for a test as `attune up` runs them, with the test's own home directory."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import httpx2

from app.cli.server import build_processes
from app.core.processes import ManagedProcess
from app.core.settings import Settings
from tests.support.engine_fixture import free_port
from tests.support.settings import to_environment

READY_SECONDS = 300.0
PATIENCE_SECONDS = 540.0  # for what must happen some time: below pytest's limit, since a loaded machine is no failure


def wait_until_live(url: str) -> None:
    """Wait until the API at a URL answers. Raises TimeoutError.

    One client asks, because each new one reads the certificates of all authorities.
    """
    ends = time.monotonic() + READY_SECONDS
    with httpx2.Client(base_url=url, timeout=1, trust_env=False) as client:
        while time.monotonic() < ends:
            with suppress(httpx2.TransportError):
                if client.get("/livez").status_code == 200:
                    return
            time.sleep(0.05)
    raise TimeoutError(f"{url} is not live after {READY_SECONDS:g} s")


@dataclass
class Processes:
    """The processes of one deployment, with the settings as environment variables."""

    settings: Settings
    environment: dict[str, str]
    children: dict[str, ManagedProcess]

    def start(self, *names: str) -> None:
        for name in names:
            self.children[name].environment |= self.environment
            self.children[name].start()
        if "api" in names:
            self.wait_for_api()

    def wait_for_api(self) -> None:
        try:
            wait_until_live(self.settings.local_url)
        except TimeoutError as error:
            raise TimeoutError(f"the API did not start; its log:\n{self.children['api'].log.read_text()}") from error

    def kill(self, name: str) -> None:
        """Kill this process with SIGKILL, and none of its children."""
        process = self.children[name].process
        assert process is not None
        process.kill()
        process.wait()

    def stop(self) -> None:
        for child in self.children.values():
            child.stop()


@contextmanager
def processes(settings: Settings) -> Iterator[Processes]:
    """Yield the processes, stopped, with `settings` as environment variables and a free port. Stop them at the end."""
    settings = settings.replace({"server.port": free_port()})
    environment = {
        **to_environment(settings),
        "ATTUNE_SERVER__PORT": str(settings.server.port),
        "OMP_NUM_THREADS": "1",
        "PATH": os.environ["PATH"],
    }
    running = Processes(settings, environment, {child.name: child for child in build_processes(settings)})
    try:
        yield running
    finally:
        running.stop()


def wait_until(condition: Callable[[], object], seconds: float = 60.0, what: str = "the condition") -> None:
    """Wait, in a test without an event loop, until the condition holds. Raises TimeoutError. Polls every 20 ms."""
    ends = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > ends:
            raise TimeoutError(f"after {seconds:.0f} s not reached: {what}")
        time.sleep(0.02)


async def until(condition: Callable[[], Awaitable[object]], seconds: float, what: str) -> None:
    """Wait until the condition holds, or fail after this time. Polls every 20 ms."""
    try:
        async with asyncio.timeout(seconds):
            while not await condition():
                await asyncio.sleep(0.02)
    except TimeoutError as error:
        raise AssertionError(f"after {seconds:.0f} s not reached: {what}") from error
