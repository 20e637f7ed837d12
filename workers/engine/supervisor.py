"""Keep one engine running with the versions that it should hold: start, load, monitor, restart."""

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack, aclosing, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from app.engines import load_errors
from app.inference.engine import EngineClient
from app.inference.pool import connect
from app.inference.transport import EngineRefused, EngineUnavailable
from workers.engine.process import EngineProcess, EngineSpec
from workers.engine.version_files import VersionOpener, VersionRef

log = logging.getLogger(__name__)
T = TypeVar("T")


class EngineRecord(Protocol):
    """Stores which incarnation of the engine runs and what it must load.

    `try_mark_ready` returns False if more versions are wanted meanwhile: they must be loaded first. `errors` says, by
    name, which versions cannot be loaded and why; the engine takes traffic without them. While
    `is_swapping_weights`, another process swaps the engine's weights, and the engine may not respond.
    """

    async def record_start(self) -> int: ...
    async def read_wanted_versions(self) -> list[VersionRef]: ...
    async def try_mark_ready(self, incarnation: int, loaded: list[str], errors: Mapping[str, str]) -> bool: ...
    async def is_swapping_weights(self, incarnation: int) -> bool: ...
    async def record_heartbeat(self, incarnation: int) -> None: ...
    async def record_load_crash(self, incarnation: int, ref: VersionRef) -> None: ...
    async def mark_down(self, incarnation: int, reason: str) -> None: ...


@dataclass(frozen=True, slots=True)
class SupervisorTimeouts:
    """Time-outs and intervals in seconds.

    A hang is noticed within `response_timeout`, or within `probe_interval + probe`, so within 40 s; the end of one of
    the engine's processes within two heartbeats. The interval between two starts grows from `min_restart_interval` to
    `max_restart_interval`, and is reset when the engine was ready for `stable_after`. An engine that starts waits for a
    version whose files cannot be read for `unreadable`, and for a damaged one not at all. An engine that is stopped
    takes no new traffic after `route_change`, and its replies have `drain` to end.
    """

    start: float = 600.0
    progress_interval: float = 5.0
    heartbeat_interval: float = 1.0
    response_timeout: float = 30.0
    probe_interval: float = 10.0
    probe: float = 30.0
    retry_interval: float = 1.0
    unreadable: float = 30.0
    record_write: float = 5.0
    route_change: float = 1.0  # until API processes know it, and the requests that they have routed are recorded
    drain: float = 600.0
    min_restart_interval: float = 0.5
    max_restart_interval: float = 30.0
    stable_after: float = 10.0


@dataclass
class Supervisor:
    """Keeps one engine running.

    `open_version` raises ValueError for a damaged version, which an engine may load and crash. `report` gets one line
    of text per event.
    """

    spec: EngineSpec
    record: EngineRecord
    open_version: VersionOpener
    _: KW_ONLY
    report: Callable[[str], None] = log.info
    timeouts: SupervisorTimeouts = SupervisorTimeouts()
    _stopping: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _stopping_now: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _ready_at: float | None = field(default=None, init=False)
    _loading: VersionRef | None = field(default=None, init=False)  # what the engine is loading, or was when it ended

    def stop(self) -> None:
        """Let the running replies end, then stop. A second call does not wait for them."""
        if self._stopping.is_set():
            self._stopping_now.set()
        self._stopping.set()

    async def run(self) -> None:
        """Run until `stop` is called. No process of the engine is left when this returns or raises."""
        interval = self.timeouts.min_restart_interval
        while not self._stopping.is_set():
            incarnation = await self._retry_until_recorded(self.record.record_start)
            started, self._ready_at, self._loading = time.monotonic(), None, None
            try:
                process = await EngineProcess.start(self.spec)
            except ValueError as error:
                reason = str(error)
            else:
                try:
                    reason = await self._run_until_end(process, incarnation)
                    if self._stopping.is_set():
                        await self._drain(process, incarnation)
                        await process.terminate()
                    elif self._loading is not None and self._loading.is_optional:
                        reason = f"{reason} (it was loading {self._loading.name})"
                        await self._try_record(self.record.record_load_crash(incarnation, self._loading))
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

    async def _drain(self, process: EngineProcess, incarnation: int) -> None:
        """Take no new traffic and wait until the running replies have ended, at most `drain` seconds."""
        if self._ready_at is None:
            return
        await self._try_record(self.record.mark_down(incarnation, "it is stopped when its replies have ended"))
        wait_for_end = asyncio.create_task(self._wait_for_replies())
        tasks = [
            wait_for_end,
            asyncio.create_task(process.wait_for_exit()),
            asyncio.create_task(self._stopping_now.wait()),
        ]
        await asyncio.wait(tasks, timeout=self.timeouts.drain, return_when=asyncio.FIRST_COMPLETED)
        if not wait_for_end.done():
            self.report("engine stopped before all replies had ended")
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    async def _wait_for_replies(self) -> None:
        """Return when the engine generates no reply, or does not respond."""
        num_running = reported = 0
        async with aclosing(connect(self.spec, self.spec.keys)) as client:
            while True:
                await asyncio.sleep(self.timeouts.route_change)  # also after the last reply, until it is delivered
                try:
                    before, num_running = num_running, await client.count_running()
                except (EngineUnavailable, EngineRefused) as error:
                    self.report(f"engine stopping: it does not say how many replies are running: {error}")
                    return
                if not before and not num_running:
                    return
                if num_running != reported:
                    self.report(f"engine stopping: {num_running} replies are running")
                    reported = num_running

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
        async with aclosing(connect(self.spec, self.spec.keys)) as client:
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
        """Check, load and warm up every wanted version until the engine can be marked ready.

        Versions that cannot be loaded are recorded with the reason, and the reconciler tries them again: one tenant's
        damaged file must not close the engine for the others.
        """
        loaded: list[str] = []
        errors: dict[str, Exception] = {}
        started, pause = time.monotonic(), self.timeouts.retry_interval
        while True:
            wanted = await self._retry_until_recorded(self.record.read_wanted_versions)
            for ref in wanted:
                if ref.name in loaded:
                    continue
                if (error := await self._try_load(client, ref)) is not None:
                    errors[ref.name] = error
                    continue
                errors.pop(ref.name, None)
                loaded = ref.loaded_after(loaded)
                self.report(f"engine holds {ref.name}")
            # Storage that cannot be read may be back in a moment; a damaged file is not repaired by waiting.
            waits = time.monotonic() - started < self.timeouts.unreadable
            final = {name: str(error) for name, error in errors.items() if not (waits and isinstance(error, OSError))}
            mark_ready = partial(self.record.try_mark_ready, incarnation, list(loaded), final)
            if await self._retry_until_recorded(mark_ready):
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, self.timeouts.max_restart_interval) if errors else self.timeouts.retry_interval

    async def _try_load(self, client: EngineClient, ref: VersionRef) -> Exception | None:
        """Load a version. Return why it is not loaded: its files are damaged or missing, the engine refuses them, or
        has ended too often while it loaded them.

        If the engine ends, `_loading` tells by which version.
        """
        if ref.crashes >= load_errors.MAX_CRASHES:
            self.report(f"{ref.name} is not loaded: the engine ended {ref.crashes} times while it loaded it")
            return ValueError(load_errors.describe_crashes(ref.name, ref.crashes))
        with ExitStack() as stack:
            try:
                path = await asyncio.to_thread(stack.enter_context, self.open_version(ref))
            except (ValueError, OSError) as error:
                self.report(f"{ref.name} is not loaded: {error}")
                return error
            self._loading = ref
            try:
                await ref.load(client, path)
            except EngineRefused as error:
                if not ref.is_optional or error.engine_status != 400:  # another status is not about this version
                    raise
                self.report(f"{ref.name} is not loaded: {error}")
                self._loading = None
                return error
            self._loading = None
        return None

    async def _monitor(self, client: EngineClient, incarnation: int) -> str:
        """Return when the engine hangs, and how.

        `is_ready` asks the engine's HTTP server. Only a generated token shows that the scheduler behind it works.
        """
        probe: asyncio.Task[bool] | None = None
        answered_at = probed_at = probe_began_at = time.monotonic()
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
                    probe, probe_began_at = self._start_probe(client, self.timeouts.probe), time.monotonic()
                if probe is not None and probe.done():
                    remaining = probe_began_at + self.timeouts.probe - time.monotonic()
                    if probe.result() or await self._is_swapping_weights(incarnation):
                        probe, probed_at = None, time.monotonic()
                    elif remaining <= 0:
                        return f"no token came within {self.timeouts.probe:.0f} s"
                    else:  # it was refused or lost its connection, which says nothing about the scheduler
                        probe = self._start_probe(client, remaining)
        finally:
            if probe is not None:
                probe.cancel()

    @staticmethod
    def _start_probe(client: EngineClient, seconds: float) -> "asyncio.Task[bool]":
        return asyncio.create_task(client.can_generate(read_timeout=seconds))

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
