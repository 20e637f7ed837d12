"""The experiment log: what each update measured, as JSON lines, one file per policy name."""

import errno
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import orjson

from app.core.settings import TrackerName

OPTIONAL_TRACKERS: tuple[TrackerName, ...] = ("tensorboard", "wandb")  # each needs the package of its name


@dataclass(frozen=True)
class Entry:
    """One update. `left_out` names the metrics that were not finite numbers.

    Example of a version: "assistant-3f2a1b-v12", with the number 12.
    """

    policy: str
    version: str
    number: int
    batch: str
    time: float
    metrics: dict[str, float]
    left_out: tuple[str, ...] = ()

    @property
    def run_name(self) -> str:
        """The policy's name with a suffix that tells policies of the same name apart. Example: "assistant-3f2a1b"."""
        return self.version.removesuffix(f"-v{self.number}")


@dataclass(frozen=True)
class ExperimentLog:
    """Entries in the order in which they were written.

    `num_incomplete` counts the lines that a killed trainer or a full disk left unfinished.
    """

    entries: list[Entry]
    num_incomplete: int = 0


def path_of(folder: Path, policy: str) -> Path:
    return folder / f"{policy}.jsonl"


def append(folder: Path, entry: Entry) -> None:
    """Write an entry with one call, so that a kill leaves all of the line or none. Raises OSError.

    After an incomplete line, the entry begins on a new line.
    """
    path = path_of(folder, entry.policy)
    folder.mkdir(parents=True, exist_ok=True)
    line = orjson.dumps(asdict(entry)) + b"\n"
    with path.open("ab+", buffering=0) as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = b"\n" + line
        if file.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def read(path: Path) -> ExperimentLog:
    """Read a log, also while a trainer writes to it: a last line that is not complete yet counts as incomplete."""
    entries, num_incomplete = [], 0
    for line in path.read_bytes().splitlines():
        try:
            entries.append(Entry(**orjson.loads(line)))
        except (orjson.JSONDecodeError, TypeError):
            num_incomplete += 1
    return ExperimentLog(entries, num_incomplete)


def require_trackers(trackers: Sequence[TrackerName]) -> None:
    """Raise ValueError if the package of a tracker is not installed; the message says what to install."""
    for tracker in trackers:
        if tracker in OPTIONAL_TRACKERS and find_spec(tracker) is None:
            raise ValueError(
                f"observability.trackers names {tracker}, which is not installed here: pip install {tracker}"
            )
