"""Commands up, stop and logs on a real `attune up`, whose engine cannot start."""

import fcntl
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TextIO

import httpx2
import psutil
import pytest

from app.cli.client import service_url
from app.cli.main import app
from app.cli.up_record import hold_record, read_running
from app.core.settings import get_settings
from app.core.settings.loading import load_settings
from tests.support.cli import run
from tests.support.engine_fixture import DEMO_MODEL, free_port
from tests.support.processes import wait_until


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name in ("ATTUNE_SERVER__PORT", "ATTUNE_SERVER__HOST", "ATTUNE_URL", "ATTUNE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path / "home"))
    get_settings.cache_clear()
    yield tmp_path / "home"
    get_settings.cache_clear()


@pytest.mark.slow  # the trainer's import of torch
def test_service_is_started_read_and_stopped(home: Path) -> None:
    port = free_port()
    environment = {**os.environ, "ATTUNE_ENGINE__PYTHON": "/bin/false", "ATTUNE_ENGINE__PORT": str(free_port())}
    environment |= {"ATTUNE_HOME": "/dev/null", "ATTUNE_MODEL": "/dev/null", "OMP_NUM_THREADS": "1"}
    options = ["--port", str(port), "--home", str(home), "--model", str(DEMO_MODEL)]
    command = [sys.executable, "-m", "app.cli.main", "up", *options]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as up:
        try:
            wait_until(lambda: _is_alive(f"http://127.0.0.1:{port}"))
            running = read_running(load_settings().settings)
            assert running is not None and (running.pid, running.url) == (up.pid, f"http://127.0.0.1:{port}")
            wait_until(lambda: len(psutil.Process(up.pid).children()) == len(running.processes))
            with closing(sqlite3.connect(home / "attune.db")) as database:
                assert database.execute("SELECT base_model FROM policies").fetchall() == [(str(DEMO_MODEL),)]
            processes = psutil.Process(up.pid).children(recursive=True)
            assert "in use by `attune up`" in run(app, ["doctor"]).output
            assert "shop" not in run(app, ["status"]).output and "assistant" in run(app, ["status"]).output
            with pytest.raises(ValueError, match="runs already"), hold_record(load_settings().settings, []):
                pass
            wait_until(lambda: "engine | " in run(app, ["logs", "--role", "engine"]).output)
            result = run(app, ["stop"])
            assert result.exit_code == 0 and f"(process {up.pid}): api, beat, worker" in result.output
            assert up.wait(10) == 0 and psutil.wait_procs(processes, 5)[1] == []
        finally:
            up.kill()
    assert f"no `attune up` runs in {home}" in run(app, ["stop"]).output


def _is_alive(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/livez", timeout=1, trust_env=False).status_code == 200
    except httpx2.TransportError:
        return False


def test_stop_says_what_did_not_end(home: Path) -> None:
    program = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "from app.cli.up_record import hold_record; from app.core.settings import get_settings\n"
        "with hold_record(get_settings(), ['api']): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "held\n"
            result = run(app, ["stop", "--timeout", "0.1"])
            assert result.exit_code == 1 and f"kill -9 {process.pid}" in result.output
        finally:
            process.kill()
    assert read_running(load_settings().settings) is None, "the record of a killed process is not that of a running one"


def test_record_is_there_only_while_the_service_runs(home: Path) -> None:
    settings, file = load_settings().settings, home / "up.json"
    with hold_record(settings, ["api"]):
        with pytest.raises(ValueError, match="runs already"), hold_record(settings, ["api"]):
            pass
        assert file.exists(), "a refused one leaves the record of the running one alone"
        assert read_running(settings) is not None
    assert not file.exists()
    with pytest.raises(RuntimeError), hold_record(settings, ["api"]):
        raise RuntimeError
    assert not file.exists()


def test_lock_on_a_record_that_its_holder_removed_meanwhile_is_not_taken(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening the file and locking it, its holder ends: the next one must lock the file that others open."""
    settings, lock = load_settings().settings, fcntl.flock
    locked: list[int] = []

    def remove_first(file: TextIO, operation: int) -> None:
        if not locked:
            (home / "up.json").unlink()
        locked.append(operation)
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with hold_record(settings, ["api"]):
        assert len(locked) == 2 and read_running(settings) is not None


def test_url_is_that_of_the_running_service(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings().settings
    assert service_url(settings) == "http://127.0.0.1:8700"
    with hold_record(settings.replace({"server.port": 9000}), []):
        assert service_url(settings) == "http://127.0.0.1:9000"
        assert service_url(settings.replace({"server.port": 9001})) == "http://127.0.0.1:9001"
        monkeypatch.setenv("ATTUNE_URL", "https://chat.example/v1/")
        assert service_url(load_settings().settings) == "https://chat.example"


def test_logs_are_followed(home: Path) -> None:
    logs = home / "logs"
    logs.mkdir(parents=True)
    (logs / "api.log").write_text("one\ntwo\nthree\n")
    (logs / "worker.log").write_text("hello\n")
    assert run(app, ["logs", "-n", "2"]).stdout == "api    | two\napi    | three\nworker | hello\n"
    assert run(app, ["logs", "--role", "worker"]).stdout == "worker | hello\n"
    unknown = run(app, ["logs", "--role", "webhook"])
    assert unknown.exit_code == 1 and "only of api, worker" in unknown.output
    command = [sys.executable, "-m", "app.cli.main", "logs", "--follow", "-n", "1", "--role", "api"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as follower:
        try:
            assert follower.stdout is not None and follower.stdout.readline() == "api | three\n"
            with open(logs / "api.log", "a") as file:
                file.write("four")
                file.flush()
                time.sleep(0.5)
                file.write(" and a half\n")
            assert follower.stdout.readline() == "api | four and a half\n"
            (logs / "api.log").write_text("anew\n")
            assert follower.stdout.readline() == "api | anew\n"
        finally:
            follower.kill()


def test_missing_logs_name_the_folder(home: Path) -> None:
    result = run(app, ["logs"])
    assert result.exit_code == 1 and f"{home}/logs has no logs" in result.output
