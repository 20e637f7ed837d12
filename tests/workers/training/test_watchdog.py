"""The watch over the ranks: who falls silent is killed, who beats is left alone; and the command that starts it."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from app.cli import main as cli
from workers.training.watchdog import BEATS, Pulse, Watch

PATIENCE = 8.0


@pytest.fixture
def rank() -> Iterator[subprocess.Popen[bytes]]:
    """A child of this process, as a rank is torchrun's."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def beat(folder: Path, pid: int) -> None:
    file = folder / str(pid)
    file.touch()
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))


def test_a_silent_rank_is_killed_and_no_sooner_than_it_was_told(rank: subprocess.Popen[bytes], tmp_path: Path) -> None:
    watch = Watch(tmp_path, PATIENCE)
    beat(tmp_path, rank.pid)
    assert [watch.look() for _ in range(BEATS)] == [[]] * BEATS
    assert rank.poll() is None
    assert watch.look() == [rank.pid]
    assert rank.wait(60) == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == [] and watch.look() == []


def test_a_rank_that_beats_is_left_alone(rank: subprocess.Popen[bytes], tmp_path: Path) -> None:
    watch = Watch(tmp_path, PATIENCE)
    for _ in range(5 * BEATS):
        beat(tmp_path, rank.pid)
        assert watch.look() == []
    assert rank.poll() is None


def test_a_number_that_is_another_process_by_then_is_not_killed(tmp_path: Path) -> None:
    command = "sleep 600 & echo $!; wait"
    with subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, start_new_session=True) as foreign:
        assert foreign.stdout is not None
        pid = int(foreign.stdout.readline())
        watch = Watch(tmp_path, PATIENCE)
        beat(tmp_path, pid)
        assert [watch.look() for _ in range(2 * BEATS)] == [[]] * (2 * BEATS)
        assert psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        os.killpg(foreign.pid, signal.SIGKILL)


def test_a_pulse_beats_from_the_start(tmp_path: Path) -> None:
    Pulse(tmp_path, PATIENCE)
    assert [file.name for file in tmp_path.iterdir()] == [str(os.getpid())]


def started(monkeypatch: pytest.MonkeyPatch, *options: str) -> list[str]:
    became: list[str] = []
    monkeypatch.setattr(cli, "_become", lambda *command: became.extend(command))
    done = CliRunner().invoke(cli.app, ["trainer", *options])
    if done.exception is not None:
        raise done.exception
    return became


def test_one_host_meets_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    command = started(monkeypatch, "--nproc", "2", "--patience", "60")
    assert command[:2] == ["workers.training.watchdog", "60.0"] and "--standalone" in command
    assert command[command.index("--nproc-per-node") + 1] == "2"


def test_hosts_meet_where_they_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    command = started(monkeypatch, "--nnodes", "2", "--rdzv-endpoint", "host-a:29500", "--rdzv-id", "night")
    told = dict(zip(command[2::2], command[3::2], strict=True))
    assert told["--nnodes"] == "2" and told["--rdzv-endpoint"] == "host-a:29500" and told["--rdzv-id"] == "night"
    assert "--standalone" not in command


def test_hosts_without_a_place_to_meet_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="--rdzv-endpoint HOST:PORT"):
        started(monkeypatch, "--nnodes", "2")
