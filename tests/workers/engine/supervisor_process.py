"""A supervisor in a separate process, to which tests send signals: `python -m ... FOLDER MODEL INTERPRETER`."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tests.support.engine_fixture import PYTHON, REPOSITORY, UNCHECKED, InMemoryEngineRecord, engine_spec
from workers.engine.supervisor import Supervisor, SupervisorTimeouts, run_until_signalled


def print_line(line: str) -> None:
    print(line, flush=True)


@contextmanager
def run_supervisor_process(
    folder: Path, model: Path, interpreter: Path = PYTHON
) -> Iterator[tuple[subprocess.Popen[str], int, Iterator[str]]]:
    """Start the supervisor. Yield the process, its engine's port, and an iterator over its output lines."""
    command = [sys.executable, "-m", __name__, str(folder), str(model), str(interpreter)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline()), iter(process.stdout)
            process.wait(timeout=60)
        finally:
            process.kill()


if __name__ == "__main__":
    folder, model, interpreter = map(Path, sys.argv[1:])
    spec = replace(engine_spec(folder, model), python=interpreter)
    print_line(str(spec.port))
    supervisor = Supervisor(
        spec, InMemoryEngineRecord(), UNCHECKED, report=print_line, timeouts=SupervisorTimeouts(progress_interval=1.0)
    )
    asyncio.run(run_until_signalled(supervisor))
