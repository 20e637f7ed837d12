"""The API with a sampler in it: whose work is the processor on? On SIGUSR1 it writes what it saw and starts anew."""

import os
import signal
import time
from collections import Counter
from pathlib import Path
from types import FrameType

import orjson
import uvicorn

from app.core.settings import REPOSITORY, get_settings

EVERY_SECONDS = 0.001
HERE = str(REPOSITORY) + os.sep


def home_of(frame: FrameType) -> str | None:
    """ "app/chat" or the name of a package; None for the standard library."""
    path = frame.f_code.co_filename
    if "site-packages/" in path:
        return path.partition("site-packages/")[2].split("/")[0].removesuffix(".py")
    if path.startswith(HERE):
        return "/".join(path.removeprefix(HERE).split("/")[:2]).removesuffix(".py")
    return None


def place(frame: FrameType | None) -> tuple[str, str]:
    """Where the work is done, and which room of ours asked for it (or, in a greenlet, which call of SQLAlchemy)."""
    where, last = None, "?"
    while frame is not None:
        home = home_of(frame)
        where = where or home
        if home is not None and home.startswith("app/"):
            return where or home, home
        last = frame.f_code.co_qualname
        frame = frame.f_back
    return where or "standard library", last


class Sampler:
    """A timer on the processor's clock interrupts the main thread: what it used since goes to where it is now."""

    def __init__(self, report: Path) -> None:
        self.report = report
        self._start()

    def _start(self) -> None:
        self.spent: Counter[tuple[str, str]] = Counter()
        self._main = self._first_main = time.thread_time()
        self._first = time.process_time()

    def look(self, number: int, frame: FrameType | None) -> None:
        used = time.thread_time()
        self.spent[place(frame)] += used - self._main
        self._main = used

    def write(self, number: int, frame: FrameType | None) -> None:
        main = time.thread_time() - self._first_main
        others = time.process_time() - self._first - main
        rows = [[where, asker, seconds] for (where, asker), seconds in self.spent.items()]
        rows.append(["other threads", "sqlite, rings of the bell", others])
        partial = self.report.with_suffix(".partial")
        partial.write_bytes(orjson.dumps(rows))
        partial.rename(self.report)
        self._start()


def main() -> None:
    settings = get_settings()
    sampler = Sampler(settings.home / "samples.json")
    signal.signal(signal.SIGPROF, sampler.look)
    signal.signal(signal.SIGUSR1, sampler.write)
    signal.setitimer(signal.ITIMER_PROF, EVERY_SECONDS, EVERY_SECONDS)
    uvicorn.run(
        "app.main:serve", factory=True, host=settings.host, port=settings.port, log_level="warning", access_log=False
    )


if __name__ == "__main__":
    main()
