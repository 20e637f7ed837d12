"""`attune up` ends with one sentence before it starts what cannot work on this machine."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.cli.server import LocalDeployment
from app.core.settings import Settings
from app.ops import start_checks
from app.ops.start_checks import require_startable
from tests.support.engine_fixture import free_port

GPU_BYTES = 80.0 * 2**30


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], Settings]:
    """Return a function that makes settings, for a machine without GPUs and a folder with a user's module."""
    (tmp_path / "shop_code.py").write_text("def rate(turn):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(start_checks, "gpu_memories", lambda: [])
    base = Settings(home=tmp_path / "home").replace({"engine.python": Path("/bin/sh")})
    ports = {"server.port": free_port(), "engine.port": free_port()}
    return lambda values: base.replace({**ports, **values})


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"model": "/nothing"}, "there is no folder /nothing. Set ATTUNE_MODEL"),
        ({"engine.python": Path("/nothing")}, "/nothing is missing: no engine can run on this machine. Run"),
        ({"trainer.device": "cuda"}, "trainer.device is cuda, and this machine has no GPU. Set it to auto"),
        ({"engine.tp_size": 2}, "engine.tp_size is 2, and this machine has no GPU. Set ATTUNE_ENGINE__TP_SIZE"),
    ],
)
def test_up_names_the_problem_before_anything_starts(
    values: dict[str, Any], expected: str, make: Callable[[dict[str, Any]], Settings]
) -> None:
    settings = make(values)
    lines: list[str] = []
    deployment = LocalDeployment(settings, lines.append)
    with pytest.raises(ValueError, match=expected), deployment:
        raise AssertionError("it started")
    assert lines == [] and not settings.home.exists(), "nothing is left behind"


def test_gpus_are_counted(make: Callable[[dict[str, Any]], Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_checks, "gpu_memories", lambda: [GPU_BYTES, GPU_BYTES])
    require_startable(make({"engine.device": "cuda", "trainer.device": "cuda", "engine.tp_size": 2}))
    with pytest.raises(ValueError, match="tp_size is 4, and this machine has 2 GPUs"):
        require_startable(make({"engine.tp_size": 4}))


@pytest.mark.slow
def test_programs_with_torch_check_the_users_code_and_the_models_layers(
    make: Callable[[dict[str, Any]], Settings],
) -> None:
    """In the current folder, as the roles that `attune up` starts in it."""
    rule = {"type": "rule", "name": "own", "function": "shop_code:rate"}
    require_startable(make({"rewards": {"sources": [{"type": "explicit"}, rule]}}))
    with pytest.raises(ValueError, match=r"algorithm: 'shop_code:Mine' cannot be imported: .* Install its package"):
        require_startable(make({"algorithm": "shop_code:Mine"}))
    with pytest.raises(ValueError, match=r"no adapters on q_pro\. trainer.lora.target_modules may be: q_proj, "):
        require_startable(make({"trainer.lora.target_modules": ("q_pro",)}))


def test_nothing_is_imported_for_what_is_built_in(
    make: Callable[[dict[str, Any]], Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    require_startable(make({"algorithm": "grpo", "engine.device": "cpu", "trainer.device": "cpu"}))
