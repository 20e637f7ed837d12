"""LoRA adapters on the base model (Hu et al., 2021): the layer, the tensor names, and the only module that knows peft.

Outside this module an adapter is a dict of float32 tensors under the names of its file, such as
`base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`. peft defines what else belongs to such a file. Its
layers are not used for computation: they pass over every output twice more, keep float32 copies of bfloat16 inputs for
the backward pass, and switch requires_grad when another adapter becomes active.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch.nn.functional import linear

from alignment.artifacts.specs import ADAPTER_CONFIG, ADAPTER_PREFIX, AdapterSpec
from alignment.config.trainer import LoRAConfig
from alignment.models.base_model import ActiveRole, ModelRole


class LoRALinear(nn.Module):
    """y = W x + b + scale · B A x, with the A and B of the active role; a role without them is the base layer alone.

    The active role is looked up in each forward pass. No parameter's requires_grad ever changes, so the optimizer and
    FSDP always see the same parameters.
    """

    def __init__(self, base_layer: nn.Linear, scale: float, active_role: ActiveRole) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.scale = scale
        self.active_role = active_role
        self.lora_A = nn.ParameterDict()
        self.lora_B = nn.ParameterDict()

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] → [..., out_features], in the dtype of `x`."""
        role = self.active_role.role
        if role not in self.lora_A:
            base: Tensor = self.base_layer(x)
            return base
        x_ND = x.flatten(0, -2)
        y_ND: Tensor = self.base_layer(x_ND)
        low_rank_NR = linear(x_ND, self.lora_A[role].to(x.dtype))
        # In place: this is the widest tensor of the layer, and autograd has not saved it.
        y_ND.addmm_(low_rank_NR, self.lora_B[role].to(x.dtype).t(), alpha=self.scale)
        return y_ND.view(*x.shape[:-1], -1)


def insert_lora_layers(model: nn.Module, spec: AdapterSpec, active_role: ActiveRole) -> None:
    """Replace the target linear layers of a frozen model by LoRA layers without adapters, in place."""
    for path in spec.module_paths:
        layer = model.get_submodule(path)
        assert isinstance(layer, nn.Linear)
        model.set_submodule(path, LoRALinear(layer, spec.scale, active_role))


def add_adapter(model: nn.Module, role: ModelRole, rank: int) -> None:
    """Add A [rank, in_features] and B [out_features, rank] for a role to every LoRA layer, all zeros.

    They are float32 for any base: bfloat16 would round optimizer steps away.
    """
    for module in model.modules():
        if isinstance(module, LoRALinear):
            base = module.base_layer
            module.lora_A[role] = nn.Parameter(torch.zeros(rank, base.in_features, device=base.weight.device))
            module.lora_B[role] = nn.Parameter(torch.zeros(base.out_features, rank, device=base.weight.device))


def adapter_parameters(model: nn.Module, role: ModelRole) -> dict[str, nn.Parameter]:
    """Return a role's adapter by the names of its file, in the model's order."""
    return {
        f"{ADAPTER_PREFIX}{path}.{matrix}.weight": getattr(module, matrix)[role]
        for path, module in model.named_modules()
        if isinstance(module, LoRALinear) and role in module.lora_A
        for matrix in ("lora_A", "lora_B")
    }


def init_adapter(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Return an untrained adapter, the same on every rank: A is uniform within ±1/√in_features, B is zero.

    Such an adapter does not change the base model's output. All tensors are float32 on the CPU.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name in sorted(shapes):
        tensors[name] = torch.zeros(shapes[name])
        if name.endswith("lora_A.weight"):
            bound = 1 / math.sqrt(shapes[name][1])
            tensors[name].uniform_(-bound, bound, generator=generator)
    return tensors


def write_config(directory: Path, spec: AdapterSpec, base_model: Path) -> None:
    """Write `adapter_config.json`. Equal adapters give equal bytes: peft keeps sets, so their order is fixed here."""
    # The engine supports scale = alpha / r only: no rank-stabilised scale, no DoRA, no bias, no extra tokens.
    config = LoraConfig(
        r=spec.rank, lora_alpha=spec.alpha, target_modules=sorted(spec.target_modules), task_type="CAUSAL_LM"
    ).to_dict()
    config |= {
        "base_model_name_or_path": str(base_model),
        "target_modules": sorted(spec.target_modules),
        "inference_mode": True,
    }
    (directory / ADAPTER_CONFIG).write_text(json.dumps(config, indent=1, sort_keys=True))


def read_config(directory: Path) -> LoRAConfig:
    """Return the rank, alpha and target modules that `adapter_config.json` states."""
    fields = json.loads((directory / ADAPTER_CONFIG).read_text())
    return LoRAConfig(r=fields["r"], alpha=fields["lora_alpha"], target_modules=tuple(fields["target_modules"]))
