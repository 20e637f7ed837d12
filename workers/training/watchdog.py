"""Runs torchrun, and kills ranks that have stopped responding, so that torchrun restarts the group.

torchrun notices a rank that ends, but not one that is stopped or stuck, for which the other ranks might wait for ever:
the wait for the next command has no time-out. Every rank therefore touches a heartbeat file of its own from a thread.
"""

import logging
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from sqlalchemy.exc import SQLAlchemyError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.run import main as torchrun

from workers.context import WorkerContext, lease_owner
from workers.training import batch_claims

log = logging.getLogger("attune.watchdog")
BEATS_PER_TIMEOUT = 8


class RankHeartbeat:
    """Touches this process's heartbeat file from a thread until the process ends."""

    def __init__(self, directory: Path, timeout_seconds: float) -> None:
        self._file = directory / str(os.getpid())
        self._interval = timeout_seconds / BEATS_PER_TIMEOUT
        self._file.touch()
        threading.Thread(target=self._run, name="rank heartbeat", daemon=True).start()

    def _run(self) -> None:
        with suppress(FileNotFoundError):  # the watchdog has ended, and this process ends with it
            while True:
                os.utime(self._file)
                time.sleep(self._interval)


class RankWatchdog:
    """Kills the ranks whose heartbeat files do not change for `timeout_seconds`.

    Silence is counted in checks, not on a clock, so a clock that is set or a machine that sleeps kills no rank.
    """

    def __init__(self, directory: Path, timeout_seconds: float) -> None:
        self._directory, self._timeout = directory, timeout_seconds
        self._interval = timeout_seconds / BEATS_PER_TIMEOUT
        self._last_beats: dict[int, tuple[int, float]] = {}  # by process: its last beat, and the seconds since then

    def run(self) -> None:
        while True:
            time.sleep(self._interval)
            self.check_ranks()

    def check_ranks(self) -> list[int]:
        """Kill the silent ranks and return their process ids. To be called once per interval."""
        killed = []
        for file in self._directory.iterdir():
            pid, beat = int(file.name), file.stat().st_mtime_ns
            last_beat, silent_seconds = self._last_beats.get(pid, (0, 0.0))
            silent_seconds = 0.0 if beat != last_beat else silent_seconds + self._interval
            self._last_beats[pid] = (beat, silent_seconds)
            if silent_seconds >= self._timeout:
                del self._last_beats[pid]
                file.unlink()
                if read_parent_pid(pid) == os.getpid():
                    killed.append(pid)
                    log.warning("rank process %d has been silent for %.0f s: killed", pid, silent_seconds)
                    os.kill(pid, signal.SIGKILL)
        return killed


def read_parent_pid(pid: int) -> int | None:
    """Return the parent of a process, or None if it has ended: then its id may be another process's soon."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, parent = status.rpartition(")")[2].split()[:2]
    return None if state == "Z" else int(parent)


def hand_back_batches(directory: Path) -> None:
    """Hand back what the ranks with a heartbeat file here were training. They have ended, because they had to stop."""
    context = WorkerContext()
    owners = [lease_owner(int(file.name)) for file in directory.iterdir()]
    try:
        log.info("%d batches are handed back", context.run(batch_claims.hand_back(context.db, owners)))
        context.run(context.db.close())
    except (SQLAlchemyError, OSError) as error:  # the leases expire without it
        log.warning("no batch was handed back: %s", error)


def main() -> None:
    """Run torchrun. Arguments: the rank time-out in seconds, then torchrun's own arguments."""
    timeout, *arguments = sys.argv[1:]
    # The agent of torch 2.13 keeps one store for all restarts. A new group often reads the addresses of the old
    # group's ranks from it and fails to connect. Unshared, every restart has a store of its own.
    os.environ.update(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    with TemporaryDirectory(prefix="attune-heartbeats-") as directory:
        watchdog = RankWatchdog(Path(directory), float(timeout))
        threading.Thread(target=watchdog.run, name="rank watchdog", daemon=True).start()
        try:
            torchrun([*arguments, "-m", "workers.trainer", "--rank-timeout", timeout, "--heartbeat-dir", directory])
        except SignalException:  # it was told to stop, and its ranks have ended
            hand_back_batches(Path(directory))


if __name__ == "__main__":
    main()
