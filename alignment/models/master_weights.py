"""Weights that are kept in float32 and read in another type, because steps are too small for bfloat16.

On one rank this does what FSDP's mixed precision does on many: all computing is in the model's own type, so
the log-probs are those of the weights as an engine holds them.
"""

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization


class ReadAs(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, weight: Tensor) -> Tensor:
        return weight.to(self.dtype)


def read_as(model: nn.Module, dtype: torch.dtype) -> None:
    """Give every reader of a float32 model its weights in `dtype`, in place; gradients come back as float32."""
    for module in list(model.modules()):
        for name, _ in list(module.named_parameters(recurse=False)):
            register_parametrization(module, name, ReadAs(dtype), unsafe=True)  # unsafe: the type may change


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """All weights by the names of a Hugging Face file; tied ones once."""
    return {
        name.replace(".parametrizations.", ".").removesuffix(".original"): parameter
        for name, parameter in model.named_parameters()
    }
