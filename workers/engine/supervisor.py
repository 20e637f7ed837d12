"""Keep one engine running with the versions that it should hold: start, load, monitor, restart."""

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, aclosing, suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from app.inference.client import EngineClient
from app.inference.transport import EngineRefused, EngineUnavailable
from workers.engine.sglang_process import EngineProcess, EngineSpec
from workers.engine.version_files import VersionOpener, VersionRef

log = logging.getLogger(__name__)
T = TypeVar("T")


class EngineRecord(Protocol):
    """Stores which incarnation of the engine runs and what it must load.

    `try_mark_ready` returns False if more versions are wanted meanwhile: they must be loaded first. While
    `is_swapping_weights`, another process swaps the engine's weights, and the engine may not respond.
    """

    async def record_start(self) -> int: ...
    async def read_wanted_versions(self) -> list[VersionRef]: ...
    async def try_mark_ready(self, incarnation: int, loaded: list[str]) -> bool: ...
    async def is_swapping_weights(self, incarnation: int) -> bool: ...
    async def record_heartbeat(self, incarnation: int) -> None: ...
    async def mark_down(self, incarnation: int, reason: str) -> None: ...


@dataclass(frozen=True, slots=True)
class SupervisorTimeouts:
    """Time-outs and intervals in seconds.

    A hang is noticed within `response_timeout`, or within `probe_interval + probe`, so within 40 s; the end of one of
    SGLang's processes within two heartbeats. The interval between two starts grows from `min_restart_interval` to
    `max_restart_interval`, and is reset when the engine was ready for `stable_after`.
    """

    start: float = 600.0
    progress_interval: float = 5.0
    heartbeat_interval: float = 1.0
    response_timeout: float = 30.0
    probe_interval: float = 10.0
    probe: float = 30.0
    retry_interval: float = 1.0
    record_write: float = 5.0
    min_restart_interval: float = 0.5
    max_restart_interval: float = 30.0
    stable_after: float = 10.0


@dataclass
class Supervisor:
    """Keeps one engine running.

    `open_version` raises ValueError for a damaged version, which SGLang would load and crash. `report` gets one line of
    text per event.
    """

    spec: EngineSpec
    record: EngineRecord
    open_version: VersionOpener
    _: KW_ONLY
    report: Callable[[str], None] = log.info
    timeouts: SupervisorTimeouts = SupervisorTimeouts()
    _stopping: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _ready_at: float | None = field(default=None, init=False)

    def stop(self) -> None:
        self._stopping.set()

    async def run(self) -> None:
        """Run until `stop` is called. No process of the engine is left when this returns or raises."""
        interval = self.timeouts.min_restart_interval
        while not self._stopping.is_set():
            incarnation = await self._retry_until_recorded(self.record.record_start)
            started, self._ready_at = time.monotonic(), None
            try:
                process = await EngineProcess.start(self.spec)
            except ValueError as error:
                reason = str(error)
            else:
                try:
                    reason = await self._run_until_end(process, incarnation)
                    if self._stopping.is_set():
                        await process.terminate()
                finally:
                    process.kill()
                await process.wait_for_exit()
            self.report(f"engine down: {reason}")
            await self._try_record(self.record.mark_down(incarnation, reason))
            ended = time.monotonic()
            if self._ready_at is not None and ended - self._ready_at > self.timeouts.stable_after:
                interval = self.timeouts.min_restart_interval
            # The interval counts from start to start: a start that took longer than that needs no further pause.
            await self._pause(max(self.timeouts.min_restart_interval, started + interval - ended))
            interval = min(2 * interval, self.timeouts.max_restart_interval)

    async def _run_until_end(self, process: EngineProcess, incarnation: int) -> str:
        """Return the reason why the engine must end, or has ended."""
        tasks = [
            asyncio.create_task(process.wait_for_exit()),
            asyncio.create_task(self._wait_for_stop()),
            asyncio.create_task(self._wait_for_lost_child(process)),
            asyncio.create_task(self._load_and_monitor(incarnation)),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # In this order: if the process has exited, that is the reason, and the other tasks report its symptoms.
            return next(task.result() for task in tasks if task in done)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _wait_for_stop(self) -> str:
        await self._stopping.wait()
        return "stopped"

    async def _wait_for_lost_child(self, process: EngineProcess) -> str:
        while (name := process.find_lost_child()) is None:
            await asyncio.sleep(self.timeouts.heartbeat_interval)
        await asyncio.sleep(self.timeouts.heartbeat_interval)  # if the main process exits too, its log says more
        return f"the engine lost its process {name}"

    async def _load_and_monitor(self, incarnation: int) -> str:
        """Load the wanted versions, mark the engine ready and monitor it. Return why it must be restarted."""
        async with aclosing(EngineClient(self.spec.url, self.spec.api_key, self.spec.admin_key)) as client:
            if not await self._wait_until_ready(client):
                return f"the engine did not answer within {self.timeouts.start:.0f} s of its start"
            try:
                await self._load_wanted_versions(client, incarnation)
            except (EngineUnavailable, EngineRefused) as error:
                return f"the engine failed while versions were loaded: {error}"
            self._ready_at = time.monotonic()
            self.report(f"engine ready on {self.spec.url}")
            return await self._monitor(client, incarnation)

    async def _wait_until_ready(self, client: EngineClient) -> bool:
        started = reported = time.monotonic()
        while (now := time.monotonic()) - started < self.timeouts.start:
            if await client.is_ready():
                return True
            if now - reported >= self.timeouts.progress_interval:
                self.report(f"engine starting: {now - started:.0f} s (log: {self.spec.log_path})")
                reported = now
            await asyncio.sleep(0.25)
        return False

    async def _load_wanted_versions(self, client: EngineClient, incarnation: int) -> None:
        """Check, load and warm up every wanted version until the engine can be marked ready."""
        loaded: list[str] = []
        pause = self.timeouts.retry_interval
        while True:
            wanted = await self._retry_until_recorded(self.record.read_wanted_versions)
            for ref in wanted:
                if ref.name not in loaded and await self._try_load(client, ref):
                    loaded[:] = [ref.name] if ref.full_weights else [*loaded, ref.name]
                    self.report(f"engine holds {ref.name}")
            if await self._retry_until_recorded(lambda: self.record.try_mark_ready(incarnation, list(loaded))):
                return
            await asyncio.sleep(pause)
            # A version that is damaged or cannot be downloaded is tried again at growing intervals.
            has_failed = any(ref.name not in loaded for ref in wanted)
            pause = min(2 * pause, self.timeouts.max_restart_interval) if has_failed else self.timeouts.retry_interval

    async def _try_load(self, client: EngineClient, ref: VersionRef) -> bool:
        """Load a version. Return False if its files are damaged or missing."""
        with ExitStack() as stack:
            try:
                path = await asyncio.to_thread(stack.enter_context, self.open_version(ref))
            except (ValueError, OSError) as error:
                self.report(f"{ref.name} is not loaded: {error}")
                return False
            if ref.full_weights:
                async with client.paused():
                    await client.load_weights(path, ref.name)
            else:
                await client.load_adapter(ref.name, path)
                await client.warm_up_adapter(ref.name)
        return True

    async def _monitor(self, client: EngineClient, incarnation: int) -> str:
        """Return when the engine hangs, and how.

        `is_ready` asks SGLang's HTTP server. Only a generated token shows that the scheduler behind it works.
        """
        probe: asyncio.Task[bool] | None = None
        answered_at = probed_at = time.monotonic()
        try:
            while True:
                await asyncio.sleep(self.timeouts.heartbeat_interval)
                if await client.is_ready():
                    answered_at = time.monotonic()
                    await self._try_record(self.record.record_heartbeat(incarnation))
                elif await self._is_swapping_weights(incarnation):
                    answered_at = probed_at = time.monotonic()
                if time.monotonic() - answered_at > self.timeouts.response_timeout:
                    return f"the engine was silent for {self.timeouts.response_timeout:.0f} s"
                if probe is None and time.monotonic() - probed_at > self.timeouts.probe_interval:
                    probe = asyncio.create_task(client.can_generate(read_timeout=self.timeouts.probe))
                if probe is not None and probe.done():
                    if not probe.result() and not await self._is_swapping_weights(incarnation):
                        return f"no token came within {self.timeouts.probe:.0f} s"
                    probe, probed_at = None, time.monotonic()
        finally:
            if probe is not None:
                probe.cancel()

    async def _is_swapping_weights(self, incarnation: int) -> bool:
        """Return whether the engine's weights are swapped, and False if the database cannot be reached."""
        try:
            async with asyncio.timeout(self.timeouts.record_write):
                return await self.record.is_swapping_weights(incarnation)
        except (SQLAlchemyError, OSError):
            return False

    async def _retry_until_recorded(self, call: Callable[[], Awaitable[T]]) -> T:
        """Retry until the database can be reached; the engine keeps running meanwhile."""
        while True:
            try:
                return await call()
            except (SQLAlchemyError, OSError) as error:
                self.report(f"the database cannot be reached, trying again: {error}")
                await asyncio.sleep(self.timeouts.retry_interval)

    async def _try_record(self, write: Awaitable[None]) -> None:
        """Write once, and only report a failure.

        The next heartbeat, or its absence, tells the same, so this must not delay monitoring, a restart or a stop.
        """
        try:
            async with asyncio.timeout(self.timeouts.record_write):
                await write
        except (SQLAlchemyError, OSError) as error:  # TimeoutError is an OSError
            self.report(f"the engine's state could not be recorded: {error}")

    async def _pause(self, seconds: float) -> None:
        """Wait, but not longer than until `stop` is called."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)


async def run_until_signalled(supervisor: Supervisor) -> None:
    """Run the supervisor until SIGTERM or SIGINT."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.stop)
    await supervisor.run()
