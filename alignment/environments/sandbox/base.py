"""What a sandbox is: it runs a program in a fresh process, with limits, and returns what the program printed."""

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum

from pydantic import Field

from alignment.config.frozen_model import Frozen
from alignment.environments.errors import InfrastructureFailure


class SandboxLimits(Frozen):
    """Limits of one run. A program that exceeds them fails, and so does nobody else.

    Example: SandboxLimits(seconds=30, memory_mb=1024)
    """

    seconds: float = Field(8.0, gt=0, le=3600, description="until a program is ended")
    memory_mb: int = Field(512, ge=64, le=65536, description="address space of the process")
    disk_mb: int = Field(64, ge=1, le=65536, description="of /tmp, the only folder that can be written to")
    file_mb: int = Field(16, ge=1, le=65536, description="of a single file")
    open_files: int = Field(64, ge=16, le=4096)
    output_bytes: int = Field(65536, ge=1024, description="of each output stream; from a longer one the middle is cut")
    concurrent_runs: int = Field(
        default_factory=lambda: os.cpu_count() or 1, ge=1, description="at a time; by default one for each core"
    )
    wait_seconds: float = Field(
        60.0, gt=0, description="for a free place; a longer wait is a failure of the host, not of the program"
    )


class Status(StrEnum):
    FINISHED = "finished"
    TIMEOUT = "timeout"


@dataclass(frozen=True)
class Execution:
    """How a program ended. `exit_code` is None after a time-out; 128 + n is the end by signal n."""

    status: Status
    exit_code: int | None
    stdout: str
    stderr: str

    @property
    def is_success(self) -> bool:
        return self.exit_code == 0


class Sandbox(ABC):
    """Runs programs, each in a process of its own: nothing of one run is left for the next.

    One object serves many episodes at a time. The time that a run waits for a free place is not the program's.
    """

    def __init__(self, limits: SandboxLimits | None = None) -> None:
        self.limits = limits or SandboxLimits()
        self._places = asyncio.Semaphore(self.limits.concurrent_runs)

    async def run(self, code: str, stdin: str = "", *, output_bytes: int | None = None) -> Execution:
        """Run a Python program. Raises InfrastructureFailure if the sandbox fails, rather than the program.

        `output_bytes` replaces that of the limits, for programs that must print more.
        """
        limits = self.limits
        if output_bytes is not None:
            limits = limits.model_copy(update={"output_bytes": output_bytes})
        async with self._place():
            return await self._run(code, stdin, limits)

    async def close(self) -> None:
        """End the processes that the sandbox holds between runs."""
        return None

    @abstractmethod
    async def _run(self, code: str, stdin: str, limits: SandboxLimits) -> Execution: ...

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self.limits.wait_seconds):
                await self._places.acquire()
        except TimeoutError as error:
            raise InfrastructureFailure(f"no free sandbox within {self.limits.wait_seconds:g} s") from error
        try:
            yield
        finally:
            self._places.release()
