"""One running SGLang with all its child processes, which end with it."""

import asyncio
import os
import signal
from contextlib import suppress
from typing import Self

import psutil

from app.core.processes import port_error
from workers.engine.launch import EngineSpec

TERMINATE_TIMEOUT_SECONDS = 10.0
LOG_TAIL_BYTES = 64 * 1024
CHILD_PREFIX = "sglang::"  # of the names of SGLang's own processes; other children may come and go


class EngineProcess:
    """SGLang in a session of its own, so that one signal reaches all its processes."""

    def __init__(self, spec: EngineSpec, process: asyncio.subprocess.Process) -> None:
        self.pid = process.pid
        self._spec = spec
        self._process = process
        self._children: dict[psutil.Process, str] = {}

    @classmethod
    async def start(cls, spec: EngineSpec) -> Self:
        require_free_port(spec)
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

    async def wait_for_exit(self) -> str:
        """Wait until the main process has ended. Return how, and the last line of its log."""
        code = await self._process.wait()
        ending = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        return f"the engine {ending}; its last log line: {self._last_log_line()}"

    def find_lost_child(self) -> str | None:
        """Return the name of a process of SGLang that has ended while the main process runs, or None.

        The main process does not always end then, but it answers no requests. Call this often: a child that started
        and ended between two calls is not noticed.
        """
        try:
            children = psutil.Process(self.pid).children(recursive=True)
        except psutil.Error:
            return None  # the main process has ended: see `wait_for_exit`
        names = {child.pid: name for child in children if (name := _name(child)).startswith(CHILD_PREFIX)}
        for child in children:
            with suppress(psutil.Error):
                # A process that a child starts has the child's name until it sets its own, so it does not count.
                if child.pid in names and names.get(child.ppid()) != names[child.pid]:
                    self._children[child] = names[child.pid]
        return next((name for child, name in self._children.items() if not _is_alive(child)), None)

    async def terminate(self) -> None:
        """Terminate all processes, and kill those that are left after TERMINATE_TIMEOUT_SECONDS."""
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(TERMINATE_TIMEOUT_SECONDS):
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
            return  # all processes have ended

    def _last_log_line(self) -> str:
        with self._spec.log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            lines = [line.strip() for line in log.read().decode("utf-8", "replace").splitlines()]
        return next((line for line in reversed(lines) if line), f"nothing in {self._spec.log_path}")


def _name(process: psutil.Process) -> str:
    try:
        return str(process.cmdline()[0]).strip()
    except (psutil.Error, IndexError):  # it has ended, or is a zombie
        return ""


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def require_free_port(spec: EngineSpec) -> None:
    """Raise ValueError if the engine's port is in use. SGLang notices only after it has loaded the model."""
    if (reason := port_error(spec.host, spec.port)) is not None:
        raise ValueError(f"the engine cannot listen on {spec.host}:{spec.port}: {reason}")
