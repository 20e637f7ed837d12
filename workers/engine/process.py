"""EngineProcess: one running SGLang with all its children, and the certainty that they can be ended."""

import asyncio
import os
import signal
from typing import Self

from app.cli.processes import why_taken
from workers.engine.launch import EngineSpec

FAREWELL_SECONDS = 10.0
LAST_WORDS_BYTES = 64 * 1024


class EngineProcess:
    """It leads a session of its own, so that one signal reaches the whole family."""

    def __init__(self, spec: EngineSpec, process: asyncio.subprocess.Process) -> None:
        self.pid = process.pid
        self._spec = spec
        self._process = process

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


def refuse_a_taken_port(spec: EngineSpec) -> None:
    """SGLang would find out only after it has loaded everything."""
    if (reason := why_taken(spec.host, spec.port)) is not None:
        raise ValueError(f"the engine cannot listen on {spec.host}:{spec.port}: {reason}")
