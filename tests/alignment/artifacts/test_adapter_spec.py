"""Adapters that do not fit the base model are rejected before an engine loads them."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch_file

from alignment.artifacts.specs import ADAPTER, ADAPTER_CONFIG, AdapterSpec, check_adapter
from alignment.config.trainer import LoRAConfig
from alignment.errors import DamagedAdapter
from alignment.models import lora
from alignment.models.base_model import load_base_model
from tests.support.adapters import adapter_spec

LORA = LoRAConfig(r=4, alpha=8)
Tensors = dict[str, np.ndarray]
K_PROJ = "base_model.model.model.layers.1.self_attn.k_proj.lora_A.weight"
LAST = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"


@pytest.fixture
def spec(base_model: Path) -> AdapterSpec:
    return adapter_spec(base_model, LORA)


@pytest.fixture
def good(tmp_path: Path, spec: AdapterSpec, base_model: Path) -> Path:
    random = np.random.default_rng(0)
    tensors = {n: random.normal(0, 0.02, shape).astype(np.float32) for n, shape in spec.shapes.items()}
    save_file(tensors, tmp_path / ADAPTER)
    lora.write_config(tmp_path, spec, base_model)
    return tmp_path


def test_spec_matches_the_tensors_of_peft(base_model: Path, spec: AdapterSpec) -> None:
    config = LoraConfig(r=LORA.r, lora_alpha=LORA.alpha, target_modules=sorted(spec.target_modules))
    model = get_peft_model(load_base_model(base_model, "float32", torch.device("cpu")), config)
    assert {n: tuple(tensor.shape) for n, tensor in get_peft_model_state_dict(model).items()} == spec.shapes


def test_valid_adapter_passes(good: Path, spec: AdapterSpec) -> None:
    check_adapter(good, spec)


def test_untrained_adapter_passes(good: Path, spec: AdapterSpec) -> None:
    save_torch_file(lora.init_adapter(spec.shapes, seed=0), good / ADAPTER)
    check_adapter(good, spec)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_files_are_supported(good: Path, spec: AdapterSpec, dtype: torch.dtype) -> None:
    tensors = {n: torch.from_numpy(t).to(dtype) for n, t in load_file(good / ADAPTER).items()}
    save_torch_file(tensors, good / ADAPTER)
    check_adapter(good, spec)
    tensors[K_PROJ][0, 0] = torch.nan
    save_torch_file(tensors, good / ADAPTER)
    with pytest.raises(DamagedAdapter, match="not finite"):
        check_adapter(good, spec)


def remove_tensor(tensors: Tensors) -> None:
    del tensors[K_PROJ]


def add_tensor(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = np.zeros((2, 2), np.float32)


def transpose(tensors: Tensors) -> None:
    tensors[K_PROJ] = np.ascontiguousarray(tensors[K_PROJ].T)


def double_rank(tensors: Tensors) -> None:
    for name in tensors:
        axis = 0 if name.endswith("lora_A.weight") else 1
        tensors[name] = np.concatenate([tensors[name]] * 2, axis=axis)


def set_nan(tensors: Tensors) -> None:
    tensors[K_PROJ][1, 2] = np.nan


def flip_an_exponent_bit(tensors: Tensors) -> None:
    tensors[K_PROJ].view(np.uint32)[0, 0] ^= 1 << 30


def zero_a_row(tensors: Tensors) -> None:
    tensors[K_PROJ][-1] = 0


def zero_the_last(tensors: Tensors) -> None:
    tensors[LAST][:] = 0


def make_integers(tensors: Tensors) -> None:
    tensors[K_PROJ] = tensors[K_PROJ].astype(np.int32)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_tensor, "lacks .*k_proj"),
        (add_tensor, "lm_head"),
        (transpose, "k_proj.* has shape"),
        (double_rank, "has shape"),
        (set_nan, "not finite"),
        (flip_an_exponent_bit, "root mean square"),
        (zero_a_row, "row of zeros"),
        (zero_the_last, "all zeros"),
        (make_integers, "type I32"),
    ],
)
def test_wrong_tensors_are_rejected(
    good: Path, spec: AdapterSpec, damage: Callable[[Tensors], None], message: str
) -> None:
    tensors = {name: tensor.copy() for name, tensor in load_file(good / ADAPTER).items()}
    damage(tensors)
    save_file(tensors, good / ADAPTER)
    with pytest.raises(DamagedAdapter, match=message):
        check_adapter(good, spec)


@pytest.mark.parametrize("size", [0, 4, 100, 5_000, -1])
def test_truncated_file_is_rejected(good: Path, spec: AdapterSpec, size: int) -> None:
    (good / ADAPTER).write_bytes((good / ADAPTER).read_bytes()[:size])
    with pytest.raises(DamagedAdapter, match=r"safetensors|bytes"):
        check_adapter(good, spec)


def test_file_with_a_tail_of_zeros_is_rejected(good: Path, spec: AdapterSpec) -> None:
    raw = (good / ADAPTER).read_bytes()
    (good / ADAPTER).write_bytes(raw[: len(raw) // 2] + bytes(len(raw) - len(raw) // 2))
    with pytest.raises(DamagedAdapter, match="zeros"):
        check_adapter(good, spec)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": 8}, "r is 8"),
        ({"lora_alpha": 32}, "lora_alpha"),
        ({"target_modules": ["q_proj"]}, "target_modules"),
        ({"use_rslora": True}, "use_rslora"),
        ({"use_dora": True}, "use_dora"),
    ],
)
def test_config_that_the_engine_would_misread_is_rejected(
    good: Path, spec: AdapterSpec, change: dict[str, object], message: str
) -> None:
    config = json.loads((good / ADAPTER_CONFIG).read_text())
    (good / ADAPTER_CONFIG).write_text(json.dumps(config | change))
    with pytest.raises(DamagedAdapter, match=message):
        check_adapter(good, spec)
