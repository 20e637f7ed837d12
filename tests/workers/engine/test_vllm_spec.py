"""The command line of vLLM from the settings, and what is refused before it starts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from app.core.settings import Settings
from tests.support.settings import by_path
from workers.engine import process
from workers.engine.specs import engine_spec


@pytest.fixture
def vllm(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path, engine={"kind": "vllm", "device": "cpu"})


def test_command_takes_its_flags_from_the_settings(vllm: Settings) -> None:
    values = {"engine__port": 9000, "dtype": "bfloat16", "max_loras_per_batch": 3, "context_length": 512}
    spec = engine_spec(vllm.replace(by_path(values | {"trainer__lora__r": 12, "engine__max_running_requests": 5})))
    command = spec.command(parent=4711)
    assert command[:5] == [str(vllm.engine.interpreter), "-m", "attune_vllm.launch", "--parent", "4711"]
    flags = {"--port=9000", "--dtype=bfloat16", "--max-loras=3", "--max-model-len=512", "--max-num-seqs=5"}
    assert flags | {"--max-lora-rank=16", "--tool-call-parser=hermes"} <= {*command}
    assert vllm.engine.interpreter.parts[-3] == ".venv-vllm" and spec.log_path.name == "engine-0.vllm.log"


def test_command_holds_no_keys_and_the_engine_gets_no_secret(vllm: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPASSWORD", "secret")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    spec = engine_spec(vllm)
    assert not any(key in flag for flag in spec.command(parent=1) for key in (spec.api_key, spec.admin_key))
    env = spec.environment()
    assert env["ATTUNE_ENGINE__API_KEY"] == spec.api_key and "secret" not in env.values()
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "4" and env["VLLM_SERVER_DEV_MODE"] == "1"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"engine.device": "cuda"}, "runs on CPUs only"),
        ({"engine.adapter_delivery": "memory"}, "engine.adapter_delivery = path"),
        (
            {"engine.versions_url": "http://api", "engine.api_key": "a", "engine.admin_key": "b", "database.url": "x"},
            "engine.versions_url",
        ),
        ({"trainer.adaptation": "full"}, "full weights need engine.kind = sglang"),
        ({"engine.max_total_tokens": 4096}, "engine.max_total_tokens is a setting of SGLang"),
        ({"engine.tp_size": 2}, "engine.tp_size is a setting of SGLang"),
        ({"engine.extra_flags": ("--middleware=mine.Guard",)}, "--middleware is set by Attune"),
    ],
)
def test_what_vllm_cannot_do_is_refused_at_start(vllm: Settings, values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        vllm.replace(values)


def test_machine_with_a_gpu_is_refused(vllm: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "GPU_DEVICES", ("/dev/null",))
    with pytest.raises(ValueError, match="this machine has a GPU"):
        engine_spec(vllm.replace({"engine.device": "auto"}))


def test_heads_that_its_kernels_do_not_know_are_refused(vllm: Settings, tmp_path: Path) -> None:
    """It would end at the first request."""
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64, "num_attention_heads": 4}))
    with pytest.raises(ValueError, match="the model's have 16"):
        replace(engine_spec(vllm), model=str(tmp_path))
