"""`attune config check` says what `attune up` would be refused for, and a refused `up` leaves nothing behind."""

import json
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from app.cli.main import app
from app.cli.server import LocalDeployment
from app.cli.up_record import hold_record
from app.core.settings import get_settings
from app.core.settings.loading import load_settings
from app.ops import experiment_log, start_checks
from tests.support.cli import run
from tests.support.engine_fixture import free_port

Check = Callable[..., tuple[int, str]]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Return a function that runs `attune config check` with a text of attune.toml: the exit status and the output.

    On a machine without GPUs and trackers, in a folder with a home of adapters of rank 8, and with a model that SGLang
    is known to compute wrongly.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATTUNE_CONFIG", "attune.toml")
    monkeypatch.setattr(start_checks, "gpu_memories", lambda: [])
    monkeypatch.setattr(experiment_log, "find_spec", lambda name: None)
    shape = {"rank": 8, "alpha": 16, "target_modules": ["q_proj"], "available_modules": ["q_proj"]}
    config = {"model_type": "mistral", "sliding_window": 4096, "max_position_embeddings": 32768}
    files = {".attune/adapter_spec.json": json.dumps(shape), "mistral/config.json": json.dumps(config)}
    for name, text in (files | {"mistral/a.safetensors": "", "mistral/tokenizer.json": "{}"}).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    ports = {"server.port": free_port(), "engine.port": free_port()}

    def check_config(text: str, *options: str) -> tuple[int, str]:
        values = {"engine.python": "'/bin/sh'"} | {path: str(port) for path, port in ports.items() if path not in text}
        lines = [f"{path} = {value}" for path, value in values.items()]
        (tmp_path / "attune.toml").write_text("\n".join([text, *lines]))
        get_settings.cache_clear()
        result = run(app, ["config", "check", *options])
        return result.exit_code, f"{result.output}{result.exception or ''}"

    return check_config


WRONG_HERE = {
    'model = "/nothing"': "there is no folder /nothing. Set ATTUNE_MODEL to a folder that exists",
    'trainer.device = "cuda"': "trainer.device is cuda, and this machine has no GPU. Set it to auto or cpu",
    'observability.trackers = ["wandb"]': "observability.trackers names wandb, which is not installed here",
    "trainer.lora.r = 9": "trainer.lora has r = 9, alpha = 16",
    'model = "mistral"': "is refused: mistral has layers that attend to the last 4096 tokens only",
}


@pytest.mark.parametrize(("text", "expected"), WRONG_HERE.items())
def test_sentence_is_that_of_up_which_leaves_nothing_behind(text: str, expected: str, check: Check) -> None:
    status, output = check(text)
    assert status == 1 and expected in output, output
    with pytest.raises(ValueError, match=re.escape(expected)), LocalDeployment(load_settings().settings, print):
        raise AssertionError("it started")
    assert [file.name for file in Path(".attune").iterdir()] == ["adapter_spec.json"]
    status, output = check(text, "--settings-only")
    assert status == 0 and "the settings are valid" in output
    assert expected.partition(". ")[0] in run(app, ["doctor"]).output


def test_settings_with_which_up_could_start_are_valid(check: Check) -> None:
    assert check("")[0] == 0


def test_all_problems_are_named_at_once(check: Check) -> None:
    status, output = check('model = "/nothing"\ntrainer.device = "cuda"')
    assert status == 1 and "there is no folder /nothing" in output and "this machine has no GPU" in output


def test_taken_port_is_named_unless_the_service_of_this_home_has_it(check: Check) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        status, output = check(f"server.port = {port}")
        assert status == 1 and f"127.0.0.1:{port} is taken" in output and "set ATTUNE_SERVER__PORT" in output
        with hold_record(load_settings().settings, ["api"]):
            assert check(f"server.port = {port}")[0] == 0
