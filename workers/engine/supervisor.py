"""Wanted adapters → a running engine that holds them."""

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from app.inference.client import EngineClient
from app.inference.errors import EngineRefused, EngineUnavailable
from workers.engine.launch import EngineSpec
from workers.engine.process import EngineProcess
from workers.engine.version_files import AdapterRef, Bring

log = logging.getLogger(__name__)
T = TypeVar("T")


class Ledger(Protocol):
    """Where it is written which engine runs and what it must hold.

    `ready` answers False when the wanted set grew meanwhile: load more and ask again. `moving`: somebody exchanges the
    engine's own weights, and it may be silent for as long as that takes.
    """

    async def starting(self) -> int: ...
    async def wanted(self) -> list[AdapterRef]: ...
    async def ready(self, incarnation: int, loaded: list[str]) -> bool: ...
    async def moving(self, incarnation: int) -> bool: ...
    async def beat(self, incarnation: int) -> None: ...
    async def down(self, incarnation: int, reason: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds. A hang is seen within `silence`, or within `probe_every + probe`: 40 at most; the death of one of
    SGLang's processes within two beats. Starts are `first_restart` apart at least, and ever more, up to
    `longest_restart`, unless the engine was ready for `settled`."""

    start: float = 600.0
    progress: float = 5.0
    beat: float = 1.0
    silence: float = 30.0
    probe_every: float = 10.0
    probe: float = 30.0
    ledger: float = 1.0
    note: float = 5.0
    first_restart: float = 0.5
    longest_restart: float = 30.0
    settled: float = 10.0


class Supervisor:
    """Keeps one engine alive. `bring` refuses a damaged adapter with ValueError: SGLang would load it and die."""

    def __init__(
        self,
        spec: EngineSpec,
        ledger: Ledger,
        bring: Bring,
        *,
        tell: Callable[[str], None] = log.info,
        patience: Patience = Patience(),
    ) -> None:
        self._spec = spec
        self._ledger = ledger
        self._bring = bring
        self._tell = tell
        self._patience = patience
        self._stopping = asyncio.Event()
        self._ready_at: float | None = None

    def stop(self) -> None:
        self._stopping.set()

    async def run(self) -> None:
        """Until `stop`. However it is left, the engine's processes are gone then."""
        delay = self._patience.first_restart
        while not self._stopping.is_set():
            incarnation = await self._insist(self._ledger.starting)
            begun, self._ready_at = time.monotonic(), None
            try:
                process = await EngineProcess.start(self._spec)
            except ValueError as error:
                reason = str(error)
            else:
                try:
                    reason = await self._attend(process, incarnation)
                    if self._stopping.is_set():
                        await process.end()
                finally:
                    process.kill()
                await process.exited()
            self._tell(f"engine down: {reason}")
            await self._note(self._ledger.down(incarnation, reason))
            ended = time.monotonic()
            if self._ready_at is not None and ended - self._ready_at > self._patience.settled:
                delay = self._patience.first_restart  # it lived: this is a new trouble
            # Between two starts, and not after an end: who loads for longer than that hammers on nothing.
            await self._pause(max(self._patience.first_restart, begun + delay - ended))
            delay = min(2 * delay, self._patience.longest_restart)

    async def _attend(self, process: EngineProcess, incarnation: int) -> str:
        """Returns the reason why it is over."""
        endings = [
            asyncio.create_task(process.exited()),
            asyncio.create_task(self._stopped()),
            asyncio.create_task(self._bereaved(process)),
            asyncio.create_task(self._care(incarnation)),
        ]
        try:
            done, _ = await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
            # When it dies, its death is the reason, and not what the others make of it.
            return next(ending.result() for ending in endings if ending in done)
        finally:
            for ending in endings:
                ending.cancel()
            await asyncio.wait(endings)

    async def _stopped(self) -> str:
        await self._stopping.wait()
        return "stopped"

    async def _bereaved(self, process: EngineProcess) -> str:
        while (lost := process.lost()) is None:
            await asyncio.sleep(self._patience.beat)
        await asyncio.sleep(self._patience.beat)  # if the head ends of it, its own last words say more
        return f"the engine lost its process {lost}"

    async def _care(self, incarnation: int) -> str:
        client = EngineClient(self._spec.url, self._spec.api_key, self._spec.admin_key)
        try:
            if not await self._answers(client):
                return f"the engine did not answer within {self._patience.start:.0f} s of its start"
            try:
                await self._furnish(client, incarnation)
            except (EngineUnavailable, EngineRefused) as error:
                return f"the engine failed while it was furnished: {error}"
            self._ready_at = time.monotonic()
            self._tell(f"engine ready on {self._spec.url}")
            return await self._watch(client, incarnation)
        finally:
            await client.aclose()

    async def _answers(self, client: EngineClient) -> bool:
        begun = told = time.monotonic()
        while (now := time.monotonic()) - begun < self._patience.start:
            if await client.ready():
                return True
            if now - told >= self._patience.progress:
                self._tell(f"engine starting: {now - begun:.0f} s (log: {self._spec.log_path})")
                told = now
            await asyncio.sleep(0.25)
        return False

    async def _furnish(self, client: EngineClient, incarnation: int) -> None:
        """Verifies, loads and warms every wanted adapter until the ledger agrees that nothing is missing."""
        loaded: list[str] = []
        pause = self._patience.ledger
        while True:
            wanted = await self._insist(self._ledger.wanted)
            for adapter in wanted:
                if adapter.name not in loaded and await self._hold(client, adapter):
                    loaded[:] = [adapter.name] if adapter.full else [*loaded, adapter.name]
                    self._tell(f"engine holds {adapter.name}")
            if await self._insist(lambda: self._ledger.ready(incarnation, list(loaded))):
                return
            await asyncio.sleep(pause)
            # What is damaged, or cannot be pulled, is not hammered at.
            failed = any(adapter.name not in loaded for adapter in wanted)
            pause = min(2 * pause, self._patience.longest_restart) if failed else self._patience.ledger

    async def _hold(self, client: EngineClient, adapter: AdapterRef) -> bool:
        with ExitStack() as stack:
            try:
                path = await asyncio.to_thread(stack.enter_context, self._bring(adapter))
            except (ValueError, OSError) as error:
                self._tell(f"{adapter.name} is not loaded: {error}")
                return False
            if adapter.full:
                async with client.paused():
                    await client.load_weights(path, adapter.name)
            else:
                await client.load_adapter(adapter.name, path)
                await client.warm(adapter.name)
        return True

    async def _watch(self, client: EngineClient, incarnation: int) -> str:
        """Returns when it hangs: the front answers `ready`, the scheduler behind it only a real token."""
        probe: asyncio.Task[bool] | None = None
        heard = probed = time.monotonic()
        try:
            while True:
                await asyncio.sleep(self._patience.beat)
                if await client.ready():
                    heard = time.monotonic()
                    await self._note(self._ledger.beat(incarnation))
                elif await self._moves(incarnation):
                    heard = probed = time.monotonic()
                if time.monotonic() - heard > self._patience.silence:
                    return f"the engine was silent for {self._patience.silence:.0f} s"
                if probe is None and time.monotonic() - probed > self._patience.probe_every:
                    probe = asyncio.create_task(client.generates(patience=self._patience.probe))
                if probe is not None and probe.done():
                    if not probe.result() and not await self._moves(incarnation):
                        return f"no token came within {self._patience.probe:.0f} s"
                    probe, probed = None, time.monotonic()
        finally:
            if probe is not None:
                probe.cancel()

    async def _moves(self, incarnation: int) -> bool:
        try:
            async with asyncio.timeout(self._patience.note):
                return await self._ledger.moving(incarnation)
        except (SQLAlchemyError, OSError):  # nobody can say so
            return False

    async def _insist(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The database may be away for a while; the engine outlives that."""
        while True:
            try:
                return await ask()
            except (SQLAlchemyError, OSError) as error:
                self._tell(f"the ledger cannot be reached, trying again: {error}")
                await asyncio.sleep(self._patience.ledger)

    async def _note(self, note: Awaitable[None]) -> None:
        """What the next beat, or its absence, says as well: no reason to hold up a watch, a restart or a stop."""
        try:
            async with asyncio.timeout(self._patience.note):
                await note
        except (SQLAlchemyError, OSError) as error:  # TimeoutError is one of the latter
            self._tell(f"the ledger could not be told: {error}")

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return


async def run_until_signalled(supervisor: Supervisor) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.stop)
    await supervisor.run()
