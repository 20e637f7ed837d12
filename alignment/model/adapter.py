"""The LoRA adapter on the trunk: the one place that knows peft.

Outside this file an adapter is a dict of float32 tensors under the names that its file has, such as
`base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`.
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from alignment.config import LoRAConfig
from alignment.manifest import ADAPTER_CONFIG

PREFIX = "base_model.model."  # peft wraps a model twice before it names its parts
NAME = "default"


def attach(model: nn.Module, lora: LoRAConfig) -> None:
    """Put an adapter on a frozen model, in place. Its parameters stay float32 whatever the model's type."""
    inject_adapter_in_model(_peft_config(lora), model, adapter_name=NAME)
    for parameter in parameters(model).values():
        parameter.data = parameter.data.float()


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapter's parameters by the names of its file, in the model's order."""
    return {
        PREFIX + name.replace(f".{NAME}.", "."): parameter
        for name, parameter in model.named_parameters()
        if ".lora_A." in name or ".lora_B." in name
    }


def fresh(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """The adapter that changes nothing yet: A uniform within ±1/√in, B zero. The same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name in sorted(shapes):
        tensors[name] = torch.zeros(shapes[name])
        if name.endswith("lora_A.weight"):
            bound = 1 / math.sqrt(shapes[name][1])
            tensors[name].uniform_(-bound, bound, generator=generator)
    return tensors


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """The base model itself: the reference needs no second copy of the weights."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def write_config(directory: Path, lora: LoRAConfig, base_model: Path) -> None:
    """The same bytes for the same adapter: peft keeps sets, whose order changes from process to process."""
    config = _peft_config(lora).to_dict()
    config |= {
        "base_model_name_or_path": str(base_model),
        "target_modules": sorted(lora.target_modules),
        "inference_mode": True,
    }
    (directory / ADAPTER_CONFIG).write_text(json.dumps(config, indent=1, sort_keys=True))


def read_config(directory: Path) -> LoRAConfig:
    fields = json.loads((directory / ADAPTER_CONFIG).read_text())
    return LoRAConfig(rank=fields["r"], alpha=fields["lora_alpha"], target_modules=tuple(fields["target_modules"]))


def _peft_config(lora: LoRAConfig) -> LoraConfig:
    # The engine knows scale = alpha / r only: no rank-stabilised scale, no DoRA, no bias, no extra tokens.
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=list(lora.target_modules),
        task_type="CAUSAL_LM",
    )
