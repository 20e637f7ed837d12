"""Full weights that an engine must not load are rejected with the reason."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from alignment.artifacts.specs import CONFIG, WEIGHTS, WeightsSpec, check_weights
from alignment.config.trainer import TrainerConfig
from alignment.errors import DamagedAdapter
from alignment.trainer.trainer import Trainer

Tensors = dict[str, np.ndarray]
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
BIAS = "model.layers.1.self_attn.q_proj.bias"


@pytest.fixture(scope="module")
def spec(base_model: Path) -> WeightsSpec:
    return WeightsSpec.from_base_model(base_model)


@pytest.fixture
def good(tmp_path: Path, base_model: Path) -> Path:
    shutil.copytree(base_model, tmp_path / "v1")
    return tmp_path / "v1"


def test_exported_weights_pass(tmp_path: Path, base_model: Path, config: TrainerConfig, spec: WeightsSpec) -> None:
    trainer = Trainer(base_model, config.model_copy(update={"lora": None}))
    check_weights(trainer.export(tmp_path / "v1", {}).path, spec)


def test_spec_of_a_sharded_base_model(tmp_path: Path, base_model: Path, spec: WeightsSpec) -> None:
    shutil.copy(base_model / CONFIG, tmp_path)
    tensors = load_file(base_model / WEIGHTS)
    for number, name in enumerate(sorted(tensors)):
        save_file({name: tensors[name]}, tmp_path / f"model-{number}.safetensors")
    assert WeightsSpec.from_base_model(tmp_path) == spec


def test_base_model_without_safetensors_is_rejected(tmp_path: Path, base_model: Path) -> None:
    shutil.copy(base_model / CONFIG, tmp_path)
    with pytest.raises(ValueError, match="no safetensors"):
        WeightsSpec.from_base_model(tmp_path)


def remove_tensor(tensors: Tensors) -> None:
    del tensors[BIAS]


def add_tensor(tensors: Tensors) -> None:
    tensors["lm_head.bias"] = np.zeros(4, np.float32)


def reshape(tensors: Tensors) -> None:
    tensors[Q_PROJ] = tensors[Q_PROJ].reshape(-1)


def as_integers(tensors: Tensors) -> None:
    tensors[Q_PROJ] = tensors[Q_PROJ].astype(np.int32)


def set_nan(tensors: Tensors) -> None:
    tensors[Q_PROJ][3, 3] = np.nan


def enlarge(tensors: Tensors) -> None:
    tensors[Q_PROJ] *= 11


def set_zeros(tensors: Tensors) -> None:
    tensors[Q_PROJ][:] = 0


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_tensor, "lacks model.layers.1.self_attn.q_proj.bias"),
        (add_tensor, "holds lm_head.bias"),
        (reshape, "has shape"),
        (as_integers, "has dtype I32"),
        (set_nan, "not finite"),
        (enlarge, "the limit is"),
        (set_zeros, "the base model has"),
    ],
)
def test_damaged_weights_are_rejected(
    good: Path, spec: WeightsSpec, damage: Callable[[Tensors], None], message: str
) -> None:
    check_weights(good, spec)
    tensors = load_file(good / WEIGHTS)
    damage(tensors)
    save_file(tensors, good / WEIGHTS)
    with pytest.raises(DamagedAdapter, match=message):
        check_weights(good, spec)


@pytest.mark.parametrize("size", [0, 5, -1])
def test_truncated_file_is_rejected(good: Path, spec: WeightsSpec, size: int) -> None:
    raw = (good / WEIGHTS).read_bytes()
    (good / WEIGHTS).write_bytes(raw[:size])
    with pytest.raises(DamagedAdapter):
        check_weights(good, spec)


def test_different_architecture_is_rejected(good: Path, spec: WeightsSpec) -> None:
    config = json.loads((good / CONFIG).read_text())
    (good / CONFIG).write_text(json.dumps(config | {"num_key_value_heads": 4}))
    with pytest.raises(DamagedAdapter, match="num_key_value_heads is 4"):
        check_weights(good, spec)


def test_additional_safetensors_files_are_rejected(good: Path, spec: WeightsSpec) -> None:
    shutil.copy(good / WEIGHTS, good / "more.safetensors")
    with pytest.raises(DamagedAdapter, match="beside"):
        check_weights(good, spec)
