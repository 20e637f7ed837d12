"""`attune stop | logs`: end the `attune up` of a home, and read the logs of its processes."""

import os
import signal
import time
from collections import deque
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, TextIO

import typer

from app.cli.client import CommandError, drop_unset
from app.cli.options import Home
from app.cli.up_record import read_running
from app.core.settings.loading import load_settings

POLL_SECONDS = 0.2


def stop(
    timeout: Annotated[float, typer.Option(min=0, help="seconds to wait for its end")] = 180.0, home: Home = None
) -> None:
    """End the `attune up` of this home, with all its processes, and wait for its end."""
    settings = load_settings().settings.replace(drop_unset(home=home))
    if (running := read_running(settings)) is None:
        typer.echo(f"no `attune up` runs in {settings.home.resolve()}")
        return
    os.kill(running.pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout
    while read_running(settings) is not None:
        if time.monotonic() > deadline:
            raise CommandError(f"process {running.pid} still runs after {timeout:g} s; `kill -9 {running.pid}` ends it")
        time.sleep(POLL_SECONDS)
    typer.echo(f"ended `attune up` at {running.url} (process {running.pid}): {', '.join(running.processes)}")


def logs(
    role: Annotated[
        list[str] | None, typer.Option(help="api, worker, trainer, …; may be given several times; default: all")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="go on with new lines until ctrl-C")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="the last lines of each log")] = 20,
    home: Home = None,
) -> None:
    """Show the logs of the processes of this home, each line after its role."""
    folder = load_settings().settings.replace(drop_unset(home=home)).logs_dir
    paths = _find_logs(folder, role)
    width = max(len(path.stem) for path in paths)
    with ExitStack() as opened, suppress(KeyboardInterrupt):
        files = [(path, opened.enter_context(open(path, errors="replace"))) for path in paths]
        for path, file in files:
            for line in deque(file, maxlen=lines):
                _print_line(path, width, line)
        while follow:
            time.sleep(POLL_SECONDS)
            for path, file in files:
                _print_new_lines(path, width, file)


def _find_logs(folder: Path, roles: list[str] | None) -> list[Path]:
    found = {path.stem: path for path in sorted(folder.glob("*.log"))}
    if not found:
        raise CommandError(f"{folder} has no logs; has `attune up` run with this ATTUNE_HOME?")
    if unknown := [role for role in roles or () if role not in found]:
        raise CommandError(f"{folder} has no log of '{unknown[0]}', only of {', '.join(found)}")
    return [found[role] for role in roles or found]


def _print_new_lines(path: Path, width: int, file: TextIO) -> None:
    if file.tell() > path.stat().st_size:  # it was emptied
        file.seek(0)
    while True:
        position = file.tell()
        line = file.readline()
        if not line.endswith("\n"):  # none, or one that is still being written
            file.seek(position)
            return
        _print_line(path, width, line)


def _print_line(path: Path, width: int, line: str) -> None:
    typer.echo(f"{path.stem:<{width}} | {line.rstrip()}")
