"""torchrun, and a watch over its ranks: one that has stopped answering is killed, so that the group starts anew.

torchrun sees a rank that ends. It does not see one that is stopped or stuck, and the others may wait for it for ever:
the idle wait for orders has no end. So every rank beats, from a thread, by touching a file of its own.
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

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.run import main as torchrun

log = logging.getLogger("attune.watch")
BEATS = 8  # in the time after which silence is fatal


class Pulse:
    """A rank's side: shows that its threads still run, until the process ends."""

    def __init__(self, folder: Path, patience: float) -> None:
        self._file = folder / str(os.getpid())
        self._seconds = patience / BEATS
        self._file.touch()
        threading.Thread(target=self._run, name="pulse", daemon=True).start()

    def _run(self) -> None:
        with suppress(FileNotFoundError):  # the watch has gone, and this process goes with it
            while True:
                os.utime(self._file)
                time.sleep(self._seconds)


class Watch:
    """torchrun's side. Silence is counted in looks, so a clock that is set or a machine that sleeps kills nobody."""

    def __init__(self, folder: Path, patience: float) -> None:
        self._folder, self._patience = folder, patience
        self._seconds = patience / BEATS
        self._heard: dict[int, tuple[int, float]] = {}  # by process: its last beat, and the silence since

    def run(self) -> None:
        while True:
            time.sleep(self._seconds)
            self.look()

    def look(self) -> list[int]:
        """One look after another `seconds` of waiting. Kills the ranks that are silent, and returns them."""
        silent = []
        for file in self._folder.iterdir():
            pid, beat = int(file.name), file.stat().st_mtime_ns
            last, silence = self._heard.get(pid, (0, 0.0))
            silence = 0.0 if beat != last else silence + self._seconds
            self._heard[pid] = (beat, silence)
            if silence >= self._patience:
                self._forget(pid, file)
                if parent_of(pid) == os.getpid():
                    silent.append(pid)
                    log.warning("rank process %d has been silent for %.0f s: killed", pid, silence)
                    os.kill(pid, signal.SIGKILL)
        return silent

    def _forget(self, pid: int, file: Path) -> None:
        del self._heard[pid]
        file.unlink()


def parent_of(pid: int) -> int | None:
    """None when it has ended: the number may be another's by then."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, parent = status.rpartition(")")[2].split()[:2]
    return None if state == "Z" else int(parent)


def main() -> None:
    """Arguments: the patience in seconds, then torchrun's own."""
    patience, *arguments = sys.argv[1:]
    # torch 2.13's agent keeps one store for all restarts, in which a new group reads the addresses of the dead one's
    # ranks as often as not, and fails to connect. Unshared, every round has a store of its own.
    os.environ.update(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    with TemporaryDirectory(prefix="attune-pulse-") as folder:
        watch = Watch(Path(folder), float(patience))
        threading.Thread(target=watch.run, name="watch", daemon=True).start()
        with suppress(SignalException):  # it was told to stop, and its ranks have ended
            torchrun([*arguments, "-m", "workers.training.loop", "--patience", patience, "--pulse", folder])


if __name__ == "__main__":
    main()
