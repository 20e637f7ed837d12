"""The sandbox of Monty: an interpreter of a part of Python, without files, network, processes and most modules.

A run takes a millisecond. Needs the package `pydantic-monty`. Programs have no standard input.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING, Literal

from alignment.environments.errors import InfrastructureFailure, describe_error
from alignment.environments.sandbox.base import Execution, Sandbox, SandboxLimits, Status
from alignment.environments.sandbox.bounded_output import BoundedOutput

if TYPE_CHECKING:
    from pydantic_monty import AsyncMonty

GRACE_SECONDS = 5.0  # until a worker that does not end a program by itself is killed
INSTALL = "the sandbox monty needs the package pydantic-monty: pip install pydantic-monty"
TIME_LIMIT = "TimeoutError: feed time limit exceeded"


class MontySandbox(Sandbox):
    """Runs programs in worker processes of Monty, which it starts at the first run."""

    def __init__(self, limits: SandboxLimits | None = None) -> None:
        super().__init__(limits)
        self._pool: AsyncMonty | None = None
        self._lock = asyncio.Lock()

    async def _run(self, code: str, stdin: str, limits: SandboxLimits) -> Execution:
        pool = await self._open_pool()
        import pydantic_monty as monty

        outputs: defaultdict[str, BoundedOutput] = defaultdict(lambda: BoundedOutput(limits.output_bytes))

        def collect(stream: Literal["stdout", "stderr"], text: str) -> None:
            outputs[stream].write(text.encode("utf-8", "replace"))

        def execution(error: str = "", *, status: Status = Status.FINISHED) -> Execution:
            exit_code = None if status is Status.TIMEOUT else int(bool(error))
            return Execution(status, exit_code, outputs["stdout"].text(), outputs["stderr"].text() + error)

        resources = monty.ResourceLimits(
            max_feed_duration_secs=limits.seconds,
            max_memory=limits.memory_mb << 20,
            max_total_sleep_secs=limits.seconds,
        )
        try:
            async with pool.checkout(limits=resources) as session:
                await session.feed_run(code, print_callback=collect)
        except (monty.MontyRuntimeError, monty.MontySyntaxError) as error:
            if str(error).startswith(TIME_LIMIT):
                return execution(status=Status.TIMEOUT)
            return execution(error.display() + "\n")
        except monty.MontyCrashedError as error:
            if error.timed_out:
                return execution(status=Status.TIMEOUT)
            return execution("the interpreter crashed\n")
        except Exception as error:
            raise InfrastructureFailure(f"Monty failed: {describe_error(error)}") from error
        return execution()

    async def close(self) -> None:
        if self._pool is not None:
            pool, self._pool = self._pool, None
            await pool.__aexit__(None, None, None)

    async def _open_pool(self) -> AsyncMonty:
        async with self._lock:
            if self._pool is None:
                try:
                    from pydantic_monty import AsyncMonty
                except ImportError as error:
                    raise InfrastructureFailure(INSTALL) from error
                try:
                    self._pool = await AsyncMonty(
                        max_processes=self.limits.concurrent_runs,
                        request_timeout=2 * self.limits.seconds + GRACE_SECONDS,
                    ).__aenter__()
                except Exception as error:
                    raise InfrastructureFailure(f"Monty cannot be started: {describe_error(error)}") from error
        return self._pool
