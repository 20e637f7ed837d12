"""Start, watch and stop child processes on this machine.

Not honcho or circus: honcho ends all processes when one dies and neither restarts nor orders them; circus restarts
them, but runs an arbiter of its own with ZeroMQ sockets and Tornado, and has no parent-death signal (PR_SET_PDEATHSIG),
so that children outlive a parent that is killed with SIGKILL.
"""

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
    """Have the kernel send this signal to this process when its parent dies, for whatever reason."""
    _libc.prctl(_PR_SET_PDEATHSIG, number)


def port_error(host: str, port: int) -> str | None:
    """Return why no process can listen on this port now, or None if one can."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return None


@dataclass
class ManagedProcess:
    """A child process in a session of its own, with its output in a log file.

    Ctrl-C does not reach it directly, so that the parent can stop its children in order. `stop_timeout` is in seconds.
    """

    name: str
    command: list[str]
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    stop_timeout: float = 15.0
    num_exits: int = 0
    process: subprocess.Popen[bytes] | None = None
    _restart_at: float = 0.0
    _started_at: float = 0.0

    def start(self) -> None:
        self.log.parent.mkdir(0o700, parents=True, exist_ok=True)
        self._started_at = time.monotonic()
        with open(self.log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as log:
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

    def restart_if_dead(self) -> str | None:
        """Restart the process after it has exited, with exponential backoff. Return a message once for each exit."""
        if self.running:
            return None
        assert self.process is not None
        if self._restart_at == 0.0:
            uptime = time.monotonic() - self._started_at
            self.num_exits = 1 if uptime > 2 * MAX_BACKOFF_SECONDS else self.num_exits + 1
            delay = min(MAX_BACKOFF_SECONDS, 2.0 ** (self.num_exits - 1) / 2)
            self._restart_at = time.monotonic() + delay
            status = self.process.returncode
            return f"{self.name} exited (status {status}); restarting it in {delay:.1f} s, see {self.log}"
        if time.monotonic() >= self._restart_at:
            self._restart_at = 0.0
            self.start()
        return None

    def stop(self) -> None:
        """Send SIGTERM, wait for `stop_timeout`, then kill the process and everything it has started."""
        if self.process is None:
            return
        if self.running:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(self.stop_timeout)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
