"""Argument checks, masked means and whitening."""

from typing import Any, get_args

import torch
from torch import Tensor

from alignment.errors import AlignmentError


def check_same_shape(**tensors: Tensor) -> None:
    """Raise ValueError, with every name and shape, unless all tensors have one shape.

    Broadcasting would turn a wrong shape into a wrong sum without an error.
    """
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"shapes do not match: {shapes}")


def check_literal(label: str, name: str, literal: Any) -> None:
    """Raise ValueError, with the allowed values, unless `name` is one of the values of the Literal type `literal`."""
    if name not in get_args(literal):
        raise ValueError(f"unknown {label} {name!r}: one of {', '.join(get_args(literal))}")


def apply_mask(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return x inside the mask and 0 elsewhere.  [B, T] → [B, T].

    x · m would keep NaN (NaN · 0 = NaN) in values and in gradients.
    """
    return torch.where(mask_BT.bool(), x_BT, torch.zeros_like(x_BT))


def masked_mean(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return Σ(x·m) / Σm.  [B, T] → scalar; NaN where the mask is empty."""
    check_same_shape(x_BT=x_BT, mask_BT=mask_BT)
    return apply_mask(x_BT, mask_BT).sum() / mask_BT.sum()


def whiten(x_BT: Tensor, mask_BT: Tensor, *, centre: bool = True) -> Tensor:
    """Return (x − mean) · rsqrt(var + 1e-8) over the masked tokens, var with Bessel's correction; 0 outside the mask.

    [B, T] → [B, T].  As in PPO implementations since Ziegler et al., 2019 (verl `masked_whiten`). With
    `centre=False` x is only scaled, x · rsqrt(var + 1e-8): for values that a baseline has centred already.
    Raises AlignmentError where the mask holds fewer than two tokens.
    """
    count = int(mask_BT.sum())
    if count < 2:
        raise AlignmentError(f"whitening needs at least two tokens, but the mask holds {count}")
    centred_BT = apply_mask(x_BT - masked_mean(x_BT, mask_BT), mask_BT)
    variance = centred_BT.square().sum() / (count - 1)
    return (centred_BT if centre else apply_mask(x_BT, mask_BT)) * torch.rsqrt(variance + 1e-8)
