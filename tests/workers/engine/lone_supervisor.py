"""A supervisor in a process of its own, to be sent signals: `python -m ... FOLDER MODEL INTERPRETER`."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tests.support.engine_fixture import PYTHON, REPOSITORY, UNCHECKED, ListLedger, engine_spec
from workers.engine.supervisor import Patience, Supervisor, run_until_signalled


def say(line: str) -> None:
    print(line, flush=True)


@contextmanager
def lone_supervisor(
    folder: Path, model: Path, interpreter: Path = PYTHON
) -> Iterator[tuple[subprocess.Popen[str], int, Iterator[str]]]:
    """The process, its engine's port, and its lines as they come."""
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
    say(str(spec.port))
    supervisor = Supervisor(spec, ListLedger(), UNCHECKED, tell=say, patience=Patience(progress=1.0))
    asyncio.run(run_until_signalled(supervisor))
