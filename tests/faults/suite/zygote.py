"""A parent that has imported everything once and forks the real processes: a Python start costs seconds, a fork none.

Orders come as JSON lines on stdin: {"start": "api", "log": "…", "environment": {…}}. Answers go to stdout:
{"started": "api", "pid": 7} and {"ended": 7, "status": -9}. The supervisors' engines knock at a socket, the argument.
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
from pathlib import Path
from typing import Any

from app.core.processes import die_with_parent
from tests.faults.suite import engine, roles

EVERYTHING = (
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


class Zygote:
    """It knows no settings: each child reads its own, so that one parent serves many deployments."""

    def __init__(self, door: Path) -> None:
        self.door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.door.bind(str(door))
        self.door.listen(16)
        self.unread = b""

    def run(self) -> None:
        while True:
            ready, _, _ = select.select([0, self.door], [], [], 0.02)
            if 0 in ready and not self.orders():
                return
            if self.door in ready:
                self.host()
            self.reap()

    def orders(self) -> bool:
        read = os.read(0, 65536)
        *lines, self.unread = (self.unread + read).split(b"\n")
        for line in lines:
            order = json.loads(line)
            pid = self.fork(lambda order=order: self.play(order))
            say({"started": order["start"], "pid": pid})
        return bool(read)

    def play(self, order: dict[str, Any]) -> None:
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(order["environment"])
        roles.play(order["start"])

    def host(self) -> None:
        """An engine for as long as the caller holds its end of the connection."""
        caller, _ = self.door.accept()
        asked = json.loads(caller.recv(65536))
        self.fork(lambda: engine.serve(asked, caller))
        caller.close()

    def fork(self, life: Callable[[], None]) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            os.setsid()
            die_with_parent(signal.SIGKILL)
            self.door.close()
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)
            life()
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
            say({"ended": pid, "status": os.waitstatus_to_exitcode(status)})


def say(answer: dict[str, Any]) -> None:
    os.write(1, json.dumps(answer).encode() + b"\n")


def main() -> None:
    die_with_parent(signal.SIGKILL)
    for name in EVERYTHING:
        importlib.import_module(name)
    assert threading.active_count() == 1, "a fork would lose these threads"
    gc.collect()
    gc.freeze()
    zygote = Zygote(Path(sys.argv[1]))
    say({"ready": True})
    zygote.run()


if __name__ == "__main__":
    main()
