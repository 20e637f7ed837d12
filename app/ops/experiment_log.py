"""Journal: what each update measured, one line of JSON an update, one file a policy's name."""

import errno
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson


@dataclass(frozen=True)
class Entry:
    """`left_out`: metrics that were no finite numbers. Example of a version: "assistant-3f2a1b-v12", of number 12."""

    policy: str
    version: str
    number: int
    batch: str
    time: float
    metrics: dict[str, float]
    left_out: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """Which policy's line of versions it belongs to, as two projects may call their policies the same."""
        return self.version.removesuffix(f"-v{self.number}")


@dataclass(frozen=True)
class Journal:
    """In the order in which they were written. `torn`: lines that a killed trainer or a full disk left unfinished."""

    entries: list[Entry]
    torn: int = 0


def path_of(folder: Path, policy: str) -> Path:
    return folder / f"{policy}.jsonl"


def append(folder: Path, entry: Entry) -> None:
    """One write, so that a kill leaves all of the line or none; a torn line before it stays a line of its own."""
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


def read(path: Path) -> Journal:
    """Also while a trainer writes: a last line that is not all there is torn."""
    entries, torn = [], 0
    for line in path.read_bytes().splitlines():
        try:
            entries.append(Entry(**orjson.loads(line)))
        except (orjson.JSONDecodeError, TypeError):
            torn += 1
    return Journal(entries, torn)
