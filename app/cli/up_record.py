"""The record of a running `attune up`: which process runs the service of a home, and at which URL.

The process holds a lock on the file as long as it lives. So the record of a process that was killed is never taken for
a running one, and two processes cannot run the service of one home.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from app.core.settings import Settings

FILE_NAME = "up.json"


@dataclass(frozen=True)
class UpRecord:
    """A running `attune up`. `url` is that of its API, `processes` the names of the processes that it runs."""

    pid: int
    url: str
    processes: list[str]


def _path(settings: Settings) -> Path:
    return settings.home.resolve() / FILE_NAME


def require_no_running(settings: Settings) -> None:
    """Raise ValueError if another process runs the service of this home."""
    if read_running(settings) is not None:
        raise ValueError(_running_error(settings))


def _running_error(settings: Settings) -> str:
    return f"the service of {settings.home.resolve()} runs already: `attune stop` ends it"


@contextmanager
def hold_record(settings: Settings, processes: Sequence[str]) -> Iterator[None]:
    """Record this process as the one that runs the service of this home, and remove the record at the end.

    Raises ValueError if another process runs it.
    """
    path = _path(settings)
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    with _open_locked(settings) as file:
        file.truncate()
        json.dump(asdict(UpRecord(os.getpid(), settings.local_url, list(processes))), file)
        file.flush()
        try:
            yield
        finally:
            if _is_at(file, path):
                path.unlink()


def _open_locked(settings: Settings) -> TextIO:
    """Return the file of the record with a lock on it."""
    path = _path(settings)
    while True:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise ValueError(_running_error(settings)) from error
        if _is_at(file, path):
            return file
        file.close()  # its holder removed it after it was opened here: a lock on it would exclude nobody


def _is_at(file: TextIO, path: Path) -> bool:
    """Whether an open file is the one at a path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def read_running(settings: Settings) -> UpRecord | None:
    """Return the `attune up` that runs the service of this home, or None."""
    try:
        with open(_path(settings)) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return UpRecord(**json.load(file))
    except (OSError, ValueError):  # no file, or a record that is being written
        pass
    return None
