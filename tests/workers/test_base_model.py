"""`adapter_spec.json`: written once per installation, and checked by everything that starts."""

import json
import subprocess
import sys
from pathlib import Path
from shutil import copytree

import pytest

from app.core.settings import DEMO_MODEL, Settings
from app.policies.adapter_shape import require_adapter_shape
from workers.base_model import adapter_spec, describe_model
from workers.engine.specs import engine_spec

WITHOUT_TORCH = """
import sys
from pathlib import Path
from workers.base_model import describe_model
try:
    print(describe_model(Path(sys.argv[1])).to_json())
except ValueError as error:
    print("ValueError:", error)
assert "torch" not in sys.modules
"""


@pytest.fixture
def base_model(tmp_path: Path) -> Path:
    return copytree(DEMO_MODEL, tmp_path / "model", ignore=lambda _, names: [n for n in names if n != "config.json"])


@pytest.fixture
def settings(tmp_path: Path, base_model: Path) -> Settings:
    return Settings(home=tmp_path / "home", model=str(base_model))


def start_again(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr("workers.base_model._adapter_specs", {})  # as in another process
    return settings


def test_first_start_writes_what_later_ones_read(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = adapter_spec(settings)
    stored = json.loads((settings.home / "adapter_spec.json").read_text())
    assert stored["rank"] == settings.trainer.lora.r and stored["dtype"] == "float32"
    assert stored["available_modules"] == ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert {name: tuple(shape) for name, shape in stored["shapes"].items()} == spec.shapes
    monkeypatch.setattr("workers.base_model.describe_model", None)  # it is not needed again
    assert adapter_spec(start_again(settings, monkeypatch)) == spec
    command = engine_spec(settings).command(parent=1)
    first = command.index("--lora-target-modules") + 1
    assert command[first : first + 7] == sorted(spec.target_modules)
    assert f"--max-lora-rank={spec.rank}" in command


def test_another_rank_or_other_modules_are_refused(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter_spec(settings)
    for path, value in (("r", 16), ("alpha", 4), ("target_modules", ("q_proj",))):
        with pytest.raises(ValueError, match=r"trainer\.lora has .* but the adapters of .* or another `home`"):
            adapter_spec(settings.replace({f"trainer.lora.{path}": value}))
    require_adapter_shape(settings.replace({"trainer.lora.target_modules": tuple(describe_targets(settings))}))


def test_unset_modules_are_not_those_of_a_narrower_installation(settings: Settings) -> None:
    adapter_spec(settings.replace({"trainer.lora.target_modules": ("q_proj",)}))
    with pytest.raises(ValueError, match="or another `home`"):
        require_adapter_shape(settings)


def describe_targets(settings: Settings) -> tuple[str, ...]:
    return describe_model(Path(settings.model)).target_modules


def test_another_base_model_in_the_same_place_is_refused(
    settings: Settings, base_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter_spec(settings)
    config = json.loads((base_model / "config.json").read_text())
    (base_model / "config.json").write_text(json.dumps(config | {"rope_theta": 5e5}))
    with pytest.raises(ValueError, match=r"Set another `home` for another base model"):
        adapter_spec(start_again(settings, monkeypatch))


def test_modules_that_the_base_model_does_not_have_are_refused(settings: Settings) -> None:
    with pytest.raises(ValueError, match=r"no adapters on qkv_proj\. trainer\.lora\.target_modules may be: q_proj, "):
        adapter_spec(settings.replace({"trainer.lora.target_modules": ("qkv_proj",)}))
    assert not (settings.home / "adapter_spec.json").exists()


def test_process_without_torch_asks_one_with_torch(base_model: Path) -> None:
    def ask(folder: Path) -> str:
        command = [sys.executable, "-c", WITHOUT_TORCH, str(folder)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert ask(base_model).strip() == describe_model(base_model).to_json()
    (base_model / "config.json").write_text('{"model_type": "chatglm9"}')
    assert ask(base_model).startswith("ValueError: ")
    assert "no configuration of a model that transformers knows" in ask(base_model)
