"""`attune up` in an empty folder with a new attune.toml: it starts a service that chats, and stops without a trace."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import psutil
import pytest

from app.cli.client import load_api_key
from app.core.settings.loading import load_settings
from tests.support.engine_fixture import free_port, require_engine_environment
from tests.support.processes import wait_until

START_SECONDS = 540.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder that was empty, with an attune.toml of `attune config init` in which a few values are changed."""
    require_engine_environment()
    folder = tmp_path / "empty"
    folder.mkdir()
    assert run("config", "init", folder=folder).returncode == 0
    text = (folder / "attune.toml").read_text()
    changes = {"port = 8700": free_port(), "port = 8710": free_port(), "r = 8": 4, "alpha = 16": 8}
    for setting, value in changes.items():
        assert f"# {setting}\n" in text
        text = text.replace(f"# {setting}\n", f"{setting.partition(' ')[0]} = {value}\n", 1)
    (folder / "attune.toml").write_text(text)
    checked = run("config", "check", folder=folder)
    assert checked.returncode == 0 and "valid: 4 from attune.toml" in checked.stdout
    return folder


@pytest.fixture
def up(folder: Path, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with (tmp_path / "up.log").open("wb") as log:
        command = [*attune(), "up"]
        running = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
        yield running
        if running.poll() is None:
            running.kill()


def run(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*attune(), *command], capture_output=True, text=True, cwd=folder, timeout=120, check=False)


def attune() -> list[str]:
    return [sys.executable, "-m", "app.cli.main"]


def wait_for(log: Path, text: str, running: subprocess.Popen[bytes]) -> str:
    wait_until(lambda: text in log.read_text() or running.poll() is not None, START_SECONDS, f"{text!r} in {log}")
    content = log.read_text()
    assert text in content, content
    return content


@pytest.mark.engine
@pytest.mark.journey
@pytest.mark.slow
def test_up_starts_everything_and_ctrl_c_stops_it(up: subprocess.Popen[bytes], folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "up.log"
    output = wait_for(log, "ready at", up)
    assert "sk-attune-" not in output and "API key saved in" in output, "a log file does not hold the key"
    children = psutil.Process(up.pid).children(recursive=True)
    assert len(children) >= 6

    file = {"ATTUNE_CONFIG": str(folder / "attune.toml"), "ATTUNE_HOME": str(folder / ".attune")}
    settings = load_settings(file).settings
    assert settings.trainer.lora.r == 4
    headers = {"authorization": f"Bearer {load_api_key(settings)}"}
    chat = {"model": "assistant", "messages": [{"role": "user", "content": "When are you open?"}], "max_tokens": 60}
    with httpx2.Client(base_url=settings.local_url, headers=headers, timeout=120, trust_env=False) as client:
        reply = client.post("/v1/chat/completions", json=chat)
        assert (reply.status_code, reply.headers["x-policy-version"]) == (200, "assistant@v0")
        feedback = {"completion_id": reply.json()["id"], "kind": "binary", "value": True}
        assert client.post("/v1/feedback", json=feedback).status_code == 201

    second_up = run("up", folder=folder)
    assert second_up.returncode == 1 and "runs already: `attune stop` ends it" in second_up.stderr

    up.send_signal(signal.SIGINT)
    assert up.wait(120) == 0
    assert "stopped" in log.read_text()
    ended, alive = psutil.wait_procs(children, timeout=60)
    assert alive == [], f"still running: {alive}, ended: {len(ended)}"
