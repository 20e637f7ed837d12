"""LoRA adapters on the trunk: the layer that adds them, their names, and the one place that knows peft.

Outside this file an adapter is a dict of float32 tensors under the names that its file has, such as
`base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`. peft says what else belongs to such a file. It does
not compute: its layers pass over every output twice more, keep float32 copies of bfloat16 inputs for the way
back, and switch requires_grad when another adapter acts.
"""

import json
import math
from pathlib import Path

import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch.nn.functional import linear

from alignment.artifacts import ADAPTER_CONFIG
from alignment.config.trainer import LoRAConfig
from alignment.models.roles import ActiveRole, ModelRole

PREFIX = "base_model.model."  # peft wraps a model twice before it names its parts


class LoRALinear(nn.Module):
    """y = W x + b + scale · B A x, with the A and B of the acting hat; a hat without them is the base layer alone.

    Who acts is looked up, never switched: no parameter's requires_grad ever changes, so optimizer and FSDP always
    see the same ones.
    """

    def __init__(self, base_layer: nn.Linear, scale: float, acting: ActiveRole) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.scale = scale
        self.acting = acting
        self.lora_A = nn.ParameterDict()
        self.lora_B = nn.ParameterDict()

    def add(self, hat: ModelRole, rank: int, trainable: bool) -> None:
        """Float32 whatever the base is: steps of an optimizer are too small for bfloat16."""
        device = self.base_layer.weight.device
        shapes = (rank, self.base_layer.in_features), (self.base_layer.out_features, rank)
        for side, shape in zip((self.lora_A, self.lora_B), shapes, strict=True):
            side[hat] = nn.Parameter(torch.zeros(shape, device=device), requires_grad=trainable)

    def forward(self, x: Tensor) -> Tensor:
        hat = self.acting.hat
        if hat not in self.lora_A:
            return self.base_layer(x)
        x_ND = x.flatten(0, -2)
        y_ND = self.base_layer(x_ND)
        low_NR = linear(x_ND, self.lora_A[hat].to(x.dtype))
        # In place: this is the widest tensor of the layer, and nobody has saved it.
        y_ND.addmm_(low_NR, self.lora_B[hat].to(x.dtype).t(), alpha=self.scale)
        return y_ND.view(*x.shape[:-1], -1)


def attach(model: nn.Module, lora: LoRAConfig, acting: ActiveRole) -> None:
    """Make room for adapters on a frozen model, in place."""
    targets = [
        (path, module)
        for path, module in model.named_modules()
        if path.rpartition(".")[2] in lora.target_modules and isinstance(module, nn.Linear)
    ]
    if not targets:
        raise ValueError(f"The base model has no linear layer called {', '.join(lora.target_modules)}.")
    for path, module in targets:
        model.set_submodule(path, LoRALinear(module, lora.alpha / lora.rank, acting))


def add(model: nn.Module, hat: ModelRole, rank: int, *, trainable: bool) -> None:
    """Give a hat an adapter of its own, all zeros."""
    for module in model.modules():
        if isinstance(module, LoRALinear):
            module.add(hat, rank, trainable)


def parameters(model: nn.Module, hat: ModelRole) -> dict[str, nn.Parameter]:
    """A hat's adapter by the names of its file, in the model's order."""
    return {
        f"{PREFIX}{path}.{side}.weight": getattr(module, side)[hat]
        for path, module in model.named_modules()
        if isinstance(module, LoRALinear) and hat in module.lora_A
        for side in ("lora_A", "lora_B")
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


def write_config(directory: Path, lora: LoRAConfig, base_model: Path) -> None:
    """The same bytes for the same adapter: peft keeps sets, whose order changes from process to process."""
    # The engine knows scale = alpha / r only: no rank-stabilised scale, no DoRA, no bias, no extra tokens.
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=list(lora.target_modules),
        task_type="CAUSAL_LM",
    ).to_dict()
    config |= {
        "base_model_name_or_path": str(base_model),
        "target_modules": sorted(lora.target_modules),
        "inference_mode": True,
    }
    (directory / ADAPTER_CONFIG).write_text(json.dumps(config, indent=1, sort_keys=True))


def read_config(directory: Path) -> LoRAConfig:
    fields = json.loads((directory / ADAPTER_CONFIG).read_text())
    return LoRAConfig(rank=fields["r"], alpha=fields["lora_alpha"], target_modules=tuple(fields["target_modules"]))
