"""Children: started in a session of their own, brought back when they die, gone with all they started."""

import sys
import time
from pathlib import Path

import psutil

from app.core.processes import ManagedProcess

SLEEP = "import time; time.sleep(60)"
FATHER = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).wait()"


def child(tmp_path: Path, program: str) -> ManagedProcess:
    return ManagedProcess("child", [sys.executable, "-c", program], tmp_path / "child.log", stop_timeout=2.0)


def wait_for(condition: object, seconds: float = 60.0) -> None:
    ends = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < ends
        time.sleep(0.02)


def test_a_child_that_dies_is_started_again_and_said_so_once(tmp_path: Path) -> None:
    one = child(tmp_path, "print('last words')")
    one.start()
    assert one.process is not None
    one.process.wait()
    first = one.process.pid
    assert "status 0" in (one.restart_if_dead() or "") and one.restart_if_dead() is None
    wait_for(lambda: one.restart_if_dead() is None and one.process is not None and one.process.pid != first)
    one.stop()
    assert "last words" in one.log.read_text()


def test_it_is_started_later_and_later_while_it_keeps_dying(tmp_path: Path) -> None:
    one = child(tmp_path, "raise SystemExit(3)")
    waits = []
    for _ in range(3):
        one.start()
        assert one.process is not None
        one.process.wait()
        news = one.restart_if_dead() or ""
        waits.append(float(news.split(" in ")[1].split(" s")[0]))
        one._restart_at = 0.0
    assert waits == [0.5, 1.0, 2.0]


def test_stopping_a_child_takes_along_what_it_started(tmp_path: Path) -> None:
    one = child(tmp_path, FATHER)
    one.start()
    assert one.process is not None
    family = psutil.Process(one.process.pid)
    wait_for(family.children)
    grandchild = family.children()[0]
    one.stop()
    assert not one.running
    wait_for(lambda: not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE)
