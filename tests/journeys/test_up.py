"""`attune up`: one command starts a service that chats, and stopping it leaves no process."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import psutil
import pytest

from app.cli.client import load_api_key
from app.core.settings import REPOSITORY, Settings
from tests.support.engine_fixture import free_port, require_engine_environment

START_SECONDS = 180.0


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    require_engine_environment()
    ports = {"ATTUNE_PORT": str(free_port()), "ATTUNE_ENGINE_PORT": str(free_port())}
    return {**os.environ, "ATTUNE_HOME": str(tmp_path / "home"), "PYTHONUNBUFFERED": "1", **ports}


@pytest.fixture
def up(env: dict[str, str], tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (tmp_path / "up.log").open("wb") as log:
        running = subprocess.Popen([*attune(), "up"], env=env, stdout=log, stderr=subprocess.STDOUT, cwd=REPOSITORY)
        yield running
        if running.poll() is None:
            running.kill()


def attune() -> list[str]:
    return [sys.executable, "-m", "app.cli.main"]


def wait_for(log: Path, text: str, running: subprocess.Popen[bytes]) -> str:
    ends = time.monotonic() + START_SECONDS
    while text not in (content := log.read_text()):
        assert running.poll() is None and time.monotonic() < ends, content
        time.sleep(0.2)
    return content


@pytest.mark.engine
@pytest.mark.journey
def test_up_starts_everything_and_ctrl_c_stops_it(
    up: subprocess.Popen[bytes], env: dict[str, str], tmp_path: Path
) -> None:
    log = tmp_path / "up.log"
    output = wait_for(log, "ready at", up)
    assert output.count("sk-attune-") == 1, "the key is printed once"
    children = psutil.Process(up.pid).children(recursive=True)
    assert len(children) >= 6

    settings = Settings(home=Path(env["ATTUNE_HOME"]), port=int(env["ATTUNE_PORT"]))
    headers = {"authorization": f"Bearer {load_api_key(settings)}"}
    chat = {"model": "assistant", "messages": [{"role": "user", "content": "When are you open?"}], "max_tokens": 60}
    with httpx2.Client(base_url=settings.url, headers=headers, timeout=120, trust_env=False) as client:
        reply = client.post("/v1/chat/completions", json=chat)
        assert (reply.status_code, reply.headers["x-policy-version"]) == (200, "assistant@v0")
        feedback = {"completion_id": reply.json()["id"], "kind": "binary", "value": True}
        assert client.post("/v1/feedback", json=feedback).status_code == 201

    second_up = subprocess.run([*attune(), "up"], env=env, capture_output=True, text=True, cwd=REPOSITORY, timeout=120)
    assert second_up.returncode == 1 and "is taken" in second_up.stderr

    up.send_signal(signal.SIGINT)
    assert up.wait(120) == 0
    assert "stopped" in log.read_text()
    ended, alive = psutil.wait_procs(children, timeout=60)
    assert alive == [], f"still running: {alive}, ended: {len(ended)}"
