"""Random batches for the tests of the formulas: float64, right-padded, with holes in the mask and empty sequences."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

GARBAGE = (float("nan"), float("inf"), float("-inf"), 1e30)


class Tokens(NamedTuple):
    """Inputs of policy losses, each of shape [B, T]."""

    logprobs_BT: Tensor
    old_BT: Tensor
    advantages_BT: Tensor
    weights_BT: Tensor
    rewards_BT: Tensor
    mask_BT: Tensor


def tokens(seed: int, sequences: int, width: int, *, dtype: torch.dtype = torch.float64) -> Tokens:
    """Return random inputs. At least two tokens are inside the mask, so that variances exist."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(sequences, width, generator=generator, dtype=dtype)

    lengths_B = torch.randint(0, width + 1, (sequences,), generator=generator)
    mask_BT = (torch.arange(width) < lengths_B[:, None]) & (torch.rand(sequences, width, generator=generator) < 0.85)
    mask_BT[0, :2] = True
    old_BT = -normal().abs() - 0.01
    return Tokens(old_BT + 0.4 * normal(), old_BT, normal(), normal().abs(), normal(), mask_BT.to(dtype))


def batches(*, sequences: int = 5, width: int = 6) -> st.SearchStrategy[Tokens]:
    return st.builds(tokens, st.integers(0, 2**32), st.integers(1, sequences), st.integers(2, width))


def fill_padding(x_BT: Tensor, mask_BT: Tensor, garbage: float) -> Tensor:
    """Return x with garbage outside the mask."""
    return torch.where(mask_BT.bool(), x_BT, garbage)


def with_gradient(loss: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a scalar loss of x and its gradient with respect to x."""
    x = x.clone().requires_grad_()
    value = loss(x)
    value.backward()
    assert x.grad is not None
    return value.detach(), x.grad


def rows(*tensors: Tensor) -> list[tuple[Any, ...]]:
    """Return the values of each token as Python numbers."""
    return list(zip(*(tensor.flatten().tolist() for tensor in tensors), strict=True))
