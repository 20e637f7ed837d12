"""The watchdog, which kills silent ranks and no others, and the command that starts it."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from app.cli import server
from app.cli.main import app
from workers.training.watchdog import BEATS_PER_TIMEOUT, RankHeartbeat, RankWatchdog

RANK_TIMEOUT = 8.0


@pytest.fixture
def rank() -> Iterator[subprocess.Popen[bytes]]:
    """A child process of this test, as a rank is a child of torchrun."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def touch_heartbeat(folder: Path, pid: int) -> None:
    file = folder / str(pid)
    file.touch()
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))


def test_silent_rank_is_killed_after_the_timeout(rank: subprocess.Popen[bytes], tmp_path: Path) -> None:
    watchdog = RankWatchdog(tmp_path, RANK_TIMEOUT)
    touch_heartbeat(tmp_path, rank.pid)
    assert [watchdog.check_ranks() for _ in range(BEATS_PER_TIMEOUT)] == [[]] * BEATS_PER_TIMEOUT
    assert rank.poll() is None
    assert watchdog.check_ranks() == [rank.pid]
    assert rank.wait(60) == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == [] and watchdog.check_ranks() == []


def test_rank_with_heartbeats_is_not_killed(rank: subprocess.Popen[bytes], tmp_path: Path) -> None:
    watchdog = RankWatchdog(tmp_path, RANK_TIMEOUT)
    for _ in range(5 * BEATS_PER_TIMEOUT):
        touch_heartbeat(tmp_path, rank.pid)
        assert watchdog.check_ranks() == []
    assert rank.poll() is None


def test_reused_process_id_is_not_killed(tmp_path: Path) -> None:
    command = "sleep 600 & echo $!; wait"
    with subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, start_new_session=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        watchdog = RankWatchdog(tmp_path, RANK_TIMEOUT)
        touch_heartbeat(tmp_path, pid)
        assert [watchdog.check_ranks() for _ in range(2 * BEATS_PER_TIMEOUT)] == [[]] * (2 * BEATS_PER_TIMEOUT)
        assert psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        os.killpg(parent.pid, signal.SIGKILL)


def test_heartbeat_file_exists_from_the_start(tmp_path: Path) -> None:
    RankHeartbeat(tmp_path, RANK_TIMEOUT)
    assert [file.name for file in tmp_path.iterdir()] == [str(os.getpid())]


def trainer_command(monkeypatch: pytest.MonkeyPatch, *options: str) -> list[str]:
    executed: list[str] = []
    monkeypatch.setattr(server, "exec_module", lambda *command: executed.extend(command))
    monkeypatch.setattr(server, "require_compatible_schema", lambda _: None)
    result = CliRunner().invoke(app, ["trainer", *options])
    if result.exception is not None:
        raise result.exception
    return executed


def test_one_host_runs_standalone(monkeypatch: pytest.MonkeyPatch) -> None:
    command = trainer_command(monkeypatch, "--nproc", "2", "--rank-timeout", "60")
    assert command[:2] == ["workers.training.watchdog", "60.0"] and "--standalone" in command
    assert command[command.index("--nproc-per-node") + 1] == "2"


def test_hosts_use_the_rendezvous_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    command = trainer_command(monkeypatch, "--nnodes", "2", "--rdzv-endpoint", "host-a:29500", "--rdzv-id", "night")
    options = dict(zip(command[2::2], command[3::2], strict=True))
    assert (options["--nnodes"], options["--rdzv-endpoint"], options["--rdzv-id"]) == ("2", "host-a:29500", "night")
    assert "--standalone" not in command


def test_several_hosts_without_an_endpoint_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="--rdzv-endpoint HOST:PORT"):
        trainer_command(monkeypatch, "--nnodes", "2")
