"""The API with a sampling profiler of its CPU time. On SIGUSR1 it writes the samples and starts again."""

import os
import signal
import time
from collections import defaultdict
from pathlib import Path
from types import FrameType

import orjson
import uvicorn

from app.core.settings import REPOSITORY, get_settings

EVERY_SECONDS = 0.001
HERE = str(REPOSITORY) + os.sep


def module_name(frame: FrameType) -> str | None:
    """Return the module in this repository (as "app/chat"), or the library; None if it is the standard library."""
    path = frame.f_code.co_filename
    if "site-packages/" in path:
        return path.partition("site-packages/")[2].split("/")[0].removesuffix(".py")
    if path.startswith(HERE):
        return "/".join(path.removeprefix(HERE).split("/")[:2]).removesuffix(".py")
    return None


def attribute(frame: FrameType | None) -> tuple[str, str]:
    """Return the module or library that runs, and the module of app/ that called it (or a SQLAlchemy call)."""
    where, last = None, "?"
    while frame is not None:
        module = module_name(frame)
        where = where or module
        if module is not None and module.startswith("app/"):
            return where or module, module
        last = frame.f_code.co_qualname
        frame = frame.f_back
    return where or "standard library", last


class Sampler:
    """A CPU timer interrupts the main thread; the CPU time since the last interrupt counts for the current stack."""

    def __init__(self, report: Path) -> None:
        self.report = report
        self._start()

    def _start(self) -> None:
        self.cpu_seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._main = self._first_main = time.thread_time()
        self._first = time.process_time()

    def sample(self, number: int, frame: FrameType | None) -> None:
        now = time.thread_time()
        self.cpu_seconds[attribute(frame)] += now - self._main
        self._main = now

    def write(self, number: int, frame: FrameType | None) -> None:
        main = time.thread_time() - self._first_main
        others = time.process_time() - self._first - main
        rows = [[where, caller, seconds] for (where, caller), seconds in self.cpu_seconds.items()]
        rows.append(["other threads", "SQLite, broker messages", others])
        partial = self.report.with_suffix(".partial")
        partial.write_bytes(orjson.dumps(rows))
        partial.rename(self.report)
        self._start()


def main() -> None:
    settings = get_settings()
    sampler = Sampler(settings.home / "samples.json")
    signal.signal(signal.SIGPROF, sampler.sample)
    signal.signal(signal.SIGUSR1, sampler.write)
    signal.setitimer(signal.ITIMER_PROF, EVERY_SECONDS, EVERY_SECONDS)
    uvicorn.run(
        "app.main:serve",
        factory=True,
        host=settings.server.host,
        port=settings.server.port,
        log_level="warning",
        access_log=False,
    )


if __name__ == "__main__":
    main()
