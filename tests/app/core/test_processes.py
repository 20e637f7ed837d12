"""ManagedProcess: restarts with growing delays, and stops with everything that it has started."""

import sys
from pathlib import Path

import psutil

from app.core.processes import ManagedProcess
from tests.support.processes import wait_until

SLEEP = "import time; time.sleep(60)"
PARENT_SCRIPT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).wait()"


def child(tmp_path: Path, program: str) -> ManagedProcess:
    return ManagedProcess("child", [sys.executable, "-c", program], tmp_path / "child.log", stop_timeout=2.0)


def test_exited_process_is_restarted_and_reported_once(tmp_path: Path) -> None:
    managed = child(tmp_path, "print('last words')")
    managed.start()
    assert managed.process is not None
    managed.process.wait()
    first = managed.process.pid
    assert "status 0" in (managed.restart_if_dead() or "") and managed.restart_if_dead() is None
    wait_until(
        lambda: managed.restart_if_dead() is None and managed.process is not None and managed.process.pid != first
    )
    managed.stop()
    assert "last words" in managed.log.read_text()


def test_restart_delay_doubles_while_the_process_keeps_exiting(tmp_path: Path) -> None:
    managed = child(tmp_path, "raise SystemExit(3)")
    delays = []
    for _ in range(3):
        managed.start()
        assert managed.process is not None
        managed.process.wait()
        message = managed.restart_if_dead() or ""
        delays.append(float(message.split(" in ")[1].split(" s")[0]))
        managed._restart_at = 0.0
    assert delays == [0.5, 1.0, 2.0]


def test_stop_also_ends_the_processes_that_it_started(tmp_path: Path) -> None:
    managed = child(tmp_path, PARENT_SCRIPT)
    managed.start()
    assert managed.process is not None
    parent = psutil.Process(managed.process.pid)
    wait_until(parent.children)
    grandchild = parent.children()[0]
    managed.stop()
    assert not managed.running
    wait_until(lambda: not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE)
