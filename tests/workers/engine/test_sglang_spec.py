"""The command line of SGLang, from the settings."""

from typing import Any

import pytest

from app.core.settings import Settings
from tests.support.settings import by_path
from workers.engine import process
from workers.engine.sglang_spec import CPU_FLAGS
from workers.engine.specs import engine_spec


def command_of(settings: Settings, **values: Any) -> list[str]:
    return engine_spec(settings.replace(by_path(values))).command(parent=4711)


def test_command_takes_its_flags_from_the_settings(settings: Settings) -> None:
    values = {"engine__port": 9000, "dtype": "bfloat16", "max_loras_per_batch": 3, "tool_call_parser": "llama3"}
    command = command_of(settings, engine__device="cpu", **values)
    flags = {"--port=9000", "--dtype=bfloat16", "--max-loras-per-batch=3", "--tool-call-parser=llama3", "--enable-lora"}
    assert flags | {*CPU_FLAGS} <= {*command}
    assert command[:5] == [str(settings.engine.interpreter), "-m", "attune_sglang_cpu.launch", "--parent", "4711"]


def test_full_weights_need_no_adapters(settings: Settings) -> None:
    assert not any("lora" in flag for flag in command_of(settings, adaptation="full", engine__device="cuda"))


@pytest.mark.parametrize(("devices", "is_cpu"), [((), True), (("/dev/null",), False)])
def test_device_auto_is_the_cpu_without_a_gpu(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, devices: tuple[str, ...], is_cpu: bool
) -> None:
    monkeypatch.setattr(process, "GPU_DEVICES", devices)
    assert ("--device=cpu" in command_of(settings, engine__device="auto")) == is_cpu


def test_command_holds_no_keys(settings: Settings) -> None:
    """Everybody who may list processes can read their flags."""
    spec = engine_spec(settings)
    assert not any(key in flag for flag in spec.command(parent=1) for key in (spec.api_key, spec.admin_key))
    assert spec.environment()["ATTUNE_ENGINE__API_KEY"] == spec.api_key


def test_engine_gets_no_secret_but_its_own_keys(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {
        "ATTUNE_DATABASE__URL": "postgresql://attune:secret-1@db/attune",
        "ATTUNE_BROKER__URL": "redis://:secret-2@broker",
        "ATTUNE_SECRETS": '{"judge": "secret-3"}',
        "ATTUNE_API_KEY": "secret-4",
        "OPENAI_API_KEY": "secret-5",
        "AWS_SECRET_ACCESS_KEY": "secret-6",
        "WANDB_API_KEY": "secret-7",
        "PGPASSWORD": "secret-8",
    }
    needed = {"PATH": "/bin", "LD_LIBRARY_PATH": "/lib", "CUDA_HOME": "/cuda", "HF_HOME": "/hf", "NCCL_DEBUG": "INFO"}
    for name, value in (secrets | needed).items():
        monkeypatch.setenv(name, value)
    env = engine_spec(settings).environment()
    assert not [name for name, value in env.items() if "secret-" in value]
    assert needed.items() <= env.items()
    assert {name for name in env if name.startswith("ATTUNE_")} == {
        "ATTUNE_ENGINE__API_KEY",
        "ATTUNE_ENGINE__ADMIN_KEY",
    }
