"""`attune up` refuses a model that does not fit on the machine, in the planner's words."""

from pathlib import Path

import pytest

from alignment.models.describe import describe_folder
from app.core.settings import Settings
from app.policies import machine_fit
from app.policies.machine_fit import gpu_memories, require_fit
from tests.alignment.planning.test_memory import write_config

GIB = 2**30


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Return the settings of a Llama of 8 B parameters whose file is as large as it would be, but has no content."""
    monkeypatch.setattr(machine_fit, "describe_by_program", describe_folder)
    monkeypatch.setattr(machine_fit, "gpu_memories", lambda: [])
    write_config(tmp_path, "llama-8b")
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(16 * GIB)
    return Settings(home=tmp_path / "home", model=str(tmp_path))


@pytest.mark.parametrize(
    ("gib", "dtype", "fits"), [(128, "float32", True), (48, "float32", False), (48, "bfloat16", True)]
)
def test_memory_of_a_machine_without_a_gpu(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, gib: int, dtype: str, fits: bool
) -> None:
    monkeypatch.setattr(machine_fit, "machine_memory", lambda: float(gib * GIB))
    settings = settings.replace({"dtype": dtype, "trainer.micro_batch_tokens": 512})
    if fits:
        require_fit(settings)
        return
    with pytest.raises(ValueError, match=r"does not fit: engine and trainer need \d+ GiB of memory, .* has 48: take"):
        require_fit(settings)


@pytest.mark.parametrize(("gpus", "fits"), [([80], True), ([24], False), ([24, 24, 24, 24], True)])
def test_memory_of_gpus(settings: Settings, monkeypatch: pytest.MonkeyPatch, gpus: list[float], fits: bool) -> None:
    monkeypatch.setattr(machine_fit, "gpu_memories", lambda: [memory * GIB for memory in gpus])
    if fits:
        require_fit(settings)
        return
    with pytest.raises(ValueError, match=r"does not fit: an update needs \d+ GiB on each of 1 GPU of this machine"):
        require_fit(settings)


def test_small_model_is_not_even_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_fit, "describe_by_program", None)
    require_fit(Settings(home=tmp_path))
    require_fit(Settings(home=tmp_path, model="Qwen/Qwen2.5-72B"))  # not downloaded yet


def test_nvidia_smi_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf '81559\\n81559\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert gpu_memories() == [81559 * 2**20] * 2
    program.write_text("#!/bin/sh\necho 'No devices were found'; exit 6\n")
    assert gpu_memories() == []
