"""Float32 master weights that are cast to another dtype whenever they are read.

Optimizer steps are too small for bfloat16. On one rank this does what FSDP's mixed precision does on several: all
computation is in the model's own dtype, so the log-probs are those of the weights as an engine holds them
(Micikevicius et al., 2018).
"""

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization


class CastOnRead(nn.Module):
    """A parametrization that returns a weight in `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, weight: Tensor) -> Tensor:
        return weight.to(self.dtype)


def enable_master_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Make every weight of a float32 model read as `dtype`, in place. Gradients are float32."""
    for module in list(model.modules()):
        for name, _ in list(module.named_parameters(recurse=False)):
            register_parametrization(module, name, CastOnRead(dtype), unsafe=True)  # unsafe allows the dtype to change


def named_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return all weights by the names of a Hugging Face file. A tied weight appears once."""
    return {
        name.replace(".parametrizations.", ".").removesuffix(".original"): parameter
        for name, parameter in model.named_parameters()
    }
