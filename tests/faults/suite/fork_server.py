"""A process that has imported everything and forks the real processes: a Python start takes seconds, a fork does not.

Requests are JSON lines on stdin: {"start": "api", "log": "…", "environment": {…}}. Events are JSON lines on stdout:
{"started": "api", "pid": 7} and {"ended": 7, "status": -9}. The argument is the path of a socket on which the launchers
of the supervisors request an engine.
"""

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from app.core.processes import die_with_parent
from tests.faults.suite import fake_engine, roles

MODULES = (
    "alembic.command",
    "app.cli.main",
    "app.main",
    "celery.apps.beat",
    "celery.apps.worker",
    "celery.bin.worker",
    "celery.concurrency.solo",
    "celery.worker.consumer",
    "kombu.transport.filesystem",
    "kombu.transport.redis",
    "psycopg",
    "aiosqlite",
    "uvicorn.lifespan.on",
    "uvicorn.protocols.http.httptools_impl",
    "workers.training.assemble",
    "workers.curate",
    "workers.engine.__main__",
    "workers.release.evaluate",
    "workers.judging.judge",
    "workers.release.publish",
    "workers.reconcile",
    "workers.trainer",
    "workers.training.loop",
)


class ForkServer:
    """Each child reads its settings from its own environment, so that one server serves many deployments."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.bind(str(path))
        self.socket.listen(16)
        self.unread = b""

    def run(self) -> None:
        while True:
            ready, _, _ = select.select([0, self.socket.fileno()], [], [], 0.02)
            if 0 in ready and not self.read_requests():
                return
            if self.socket.fileno() in ready:
                self.start_engine()
            self.reap()

    def read_requests(self) -> bool:
        """Start the requested processes. Return False at the end of the input."""
        content = os.read(0, 65536)
        *lines, self.unread = (self.unread + content).split(b"\n")
        for line in lines:
            request = json.loads(line)
            pid = self.fork(partial(self.run_child, request))
            send({"started": request["start"], "pid": pid})
        return bool(content)

    def run_child(self, request: dict[str, Any]) -> None:
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(request["environment"])
        roles.run(request["start"])

    def start_engine(self) -> None:
        """Start an engine that ends when its launcher closes the connection."""
        launcher, _ = self.socket.accept()
        request = json.loads(launcher.recv(65536))
        self.fork(lambda: fake_engine.serve(request, launcher))
        launcher.close()

    def fork(self, main: Callable[[], None]) -> int:
        """Run `main` in a child process. Return its pid."""
        pid = os.fork()
        if pid:
            return pid
        try:
            os.setsid()
            die_with_parent(signal.SIGKILL)
            self.socket.close()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            main()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            send({"ended": pid, "status": os.waitstatus_to_exitcode(status)})


def send(event: dict[str, Any]) -> None:
    os.write(1, json.dumps(event).encode() + b"\n")


def main() -> None:
    die_with_parent(signal.SIGKILL)
    for name in MODULES:
        importlib.import_module(name)
    assert threading.active_count() == 1, "a fork would lose the other threads"
    gc.collect()
    gc.freeze()
    server = ForkServer(Path(sys.argv[1]))
    send({"ready": True})
    server.run()


if __name__ == "__main__":
    main()
