"""EngineProcess: one running SGLang with all its children, and the certainty that they can be ended."""

import asyncio
import os
import signal
from contextlib import suppress
from typing import Self

import psutil

from app.cli.processes import why_taken
from workers.engine.launch import EngineSpec

FAREWELL_SECONDS = 10.0
LAST_WORDS_BYTES = 64 * 1024
MEMBERS = "sglang::"  # so SGLang calls its processes; what Python starts beside them may come and go


class EngineProcess:
    """It leads a session of its own, so that one signal reaches the whole family."""

    def __init__(self, spec: EngineSpec, process: asyncio.subprocess.Process) -> None:
        self.pid = process.pid
        self._spec = spec
        self._process = process
        self._members: dict[psutil.Process, str] = {}

    @classmethod
    async def start(cls, spec: EngineSpec) -> Self:
        refuse_a_taken_port(spec)
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(spec.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            process = await asyncio.create_subprocess_exec(
                *spec.command(parent=os.getpid()),
                env=spec.environment(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        finally:
            os.close(log)
        return cls(spec, process)

    async def exited(self) -> str:
        """Waits for its end and says how it came."""
        code = await self._process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        return f"the engine {how}; its last words: {self._last_words()}"

    def lost(self) -> str | None:
        """The name of one of SGLang's processes that is gone while the head lives: it does not always end then, and
        answers nobody. Ask it often, for who came and went in between was never seen."""
        try:
            children = psutil.Process(self.pid).children(recursive=True)
        except psutil.Error:
            return None  # the head is gone: `exited` tells
        names = {child.pid: name for child in children if (name := _name(child)).startswith(MEMBERS)}
        for child in children:
            with suppress(psutil.Error):
                # Whatever they start (a compiler, a pool's worker) bears their name until it has one of its own.
                if child.pid in names and names.get(child.ppid()) != names[child.pid]:
                    self._members[child] = names[child.pid]
        return next((name for child, name in self._members.items() if not _lives(child)), None)

    async def end(self) -> None:
        """Asks, waits a little, then kills; nothing of it is left when this returns."""
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(FAREWELL_SECONDS):
                await self._process.wait()
        except TimeoutError:
            pass
        finally:
            self.kill()
        await self._process.wait()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return  # the whole family is gone already

    def _last_words(self) -> str:
        with self._spec.log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LAST_WORDS_BYTES))
            lines = [line.strip() for line in log.read().decode("utf-8", "replace").splitlines()]
        return next((line for line in reversed(lines) if line), f"nothing in {self._spec.log_path}")


def _name(process: psutil.Process) -> str:
    try:
        return str(process.cmdline()[0]).strip()
    except (psutil.Error, IndexError):  # it went meanwhile, or is a zombie
        return ""


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def refuse_a_taken_port(spec: EngineSpec) -> None:
    """SGLang would find out only after it has loaded everything."""
    if (reason := why_taken(spec.host, spec.port)) is not None:
        raise ValueError(f"the engine cannot listen on {spec.host}:{spec.port}: {reason}")
