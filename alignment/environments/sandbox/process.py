"""A process with limits: it is killed at its time-out, and of its output only head and tail are held in memory."""

import asyncio
import math
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from alignment.environments.errors import InfrastructureFailure
from alignment.environments.sandbox.base import Execution, SandboxLimits, Status
from alignment.environments.sandbox.bounded_output import BoundedOutput

KILL_SECONDS = 5.0  # until a killed process is gone; one that has left its group may hold the pipes open


def with_rlimits(command: Sequence[str], limits: SandboxLimits) -> list[str]:
    """Return a command that starts the command under resource limits, which it cannot raise, behind chats.

    A shell sets them, since a function between fork and exec may deadlock in a process with threads.
    """
    limit_flags = {
        "c": 0,
        "t": math.ceil(limits.seconds) + 1,  # seconds of CPU
        "v": limits.memory_mb * 1024,
        "f": limits.file_mb * 2048,  # blocks of 512 bytes
        "n": limits.open_files,
    }
    script = " && ".join(f"ulimit -{flag} {value}" for flag, value in limit_flags.items())
    return ["/bin/sh", "-c", f'{script} && exec nice -n 10 "$@"', "sh", *command]


async def run_process(
    command: Sequence[str],
    stdin: str,
    limits: SandboxLimits,
    *,
    environment: Mapping[str, str],
    directory: Path | None = None,
    pass_fds: Sequence[int] = (),
) -> Execution:
    """Run a command to its end, or kill it and all processes of its group. Raises InfrastructureFailure."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict(environment),
            cwd=directory,
            pass_fds=pass_fds,
            start_new_session=True,
        )
    except OSError as error:
        raise InfrastructureFailure(f"no process could be started: {error}") from error
    assert process.stdin and process.stdout and process.stderr
    outputs = [BoundedOutput(limits.output_bytes) for _ in range(2)]
    work = asyncio.gather(
        _feed(process.stdin, stdin.encode("utf-8", "replace")),
        _read(process.stdout, outputs[0]),
        _read(process.stderr, outputs[1]),
        process.wait(),
    )
    try:
        await asyncio.wait([work], timeout=limits.seconds)
        status = Status.FINISHED if work.done() else Status.TIMEOUT
    finally:
        # Also after the process has ended: others of its group may go on.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # The pipes are read to their end, without which asyncio does not notice the end of the process.
        await asyncio.wait([work], timeout=KILL_SECONDS)
        work.cancel()
    if work.done() and not work.cancelled() and (failure := work.exception()) is not None:
        raise InfrastructureFailure(f"a process's streams failed: {failure}") from failure
    stdout, stderr = (output.text() for output in outputs)
    if status is Status.TIMEOUT or process.returncode is None:
        return Execution(Status.TIMEOUT, None, stdout, stderr)
    code = process.returncode
    return Execution(status, code if code >= 0 else 128 - code, stdout, stderr)


async def _feed(stream: asyncio.StreamWriter, data: bytes) -> None:
    # The program need not read. Where its end has closed the pipe, asyncio raises the former, and uvloop the latter.
    with suppress(ConnectionError, RuntimeError):
        stream.write(data)
        await stream.drain()
    stream.close()


async def _read(stream: asyncio.StreamReader, output: BoundedOutput) -> None:
    while data := await stream.read(65536):
        output.write(data)
