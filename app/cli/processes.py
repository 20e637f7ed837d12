"""The one place where processes are started, watched and stopped."""

import ctypes
import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)
MAX_BACKOFF_SECONDS = 30.0


def die_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Ask the kernel for this signal when the parent dies, however it dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, number)


def why_taken(host: str, port: int) -> str | None:
    """Why nobody can listen there now; None when somebody can."""
    with socket.socket() as door:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            door.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return None


@dataclass
class Child:
    """A process of ours in a session of its own (ctrl-C reaches it through us, in order), its output in a file."""

    name: str
    command: list[str]
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    patience: float = 15.0
    deaths: int = 0
    process: subprocess.Popen[bytes] | None = None
    _again_at: float = 0.0
    _started_at: float = 0.0

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._started_at = time.monotonic()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment},
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def revive(self) -> str | None:
        """Start it again if it died, later and later each time. A sentence when there is something to say."""
        if self.running:
            return None
        assert self.process is not None
        if self._again_at == 0.0:
            lived = time.monotonic() - self._started_at
            self.deaths = 1 if lived > 2 * MAX_BACKOFF_SECONDS else self.deaths + 1
            wait = min(MAX_BACKOFF_SECONDS, 2.0 ** (self.deaths - 1) / 2)
            self._again_at = time.monotonic() + wait
            status = self.process.returncode
            return f"{self.name} ended (status {status}); starting it again in {wait:.1f} s, see {self.log}"
        if time.monotonic() >= self._again_at:
            self._again_at = 0.0
            self.start()
        return None

    def stop(self) -> None:
        """Ask, wait, then insist; whatever it left running goes too."""
        if self.process is None:
            return
        if self.running:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(self.patience)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
