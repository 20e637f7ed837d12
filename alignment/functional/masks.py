"""Means and whitening over the tokens that count."""

import torch
from torch import Tensor

from alignment.errors import AlignmentError
from alignment.functional.arguments import same_shape


def inside(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """x where there is a token, 0 elsewhere.  [B, T] → [B, T].

    Not x · m, which would keep NaN (NaN · 0 = NaN) in values and in gradients.
    """
    return torch.where(mask_BT.bool(), x_BT, torch.zeros_like(x_BT))


def masked_mean(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Σ(x·m) / Σm.  [B, T] → scalar; NaN where the mask is empty, for a mean of nothing is no number."""
    same_shape(x_BT=x_BT, mask_BT=mask_BT)
    return inside(x_BT, mask_BT).sum() / mask_BT.sum()


def whiten(x_BT: Tensor, mask_BT: Tensor, *, centre: bool = True) -> Tensor:
    """(x − mean) · rsqrt(var + 1e-8) over the masked tokens, var with Bessel's correction; 0 outside the mask.

    [B, T] → [B, T].  As in PPO implementations since Ziegler et al., 2019 (verl `masked_whiten`). With
    `centre=False` x is only scaled, x · rsqrt(var + 1e-8): for what has been centred by a baseline already.
    Raises AlignmentError where the mask holds fewer than two tokens: one number has no variance.
    """
    count = int(mask_BT.sum())
    if count < 2:
        raise AlignmentError(f"whitening needs two tokens at least, the mask holds {count}")
    centred_BT = inside(x_BT - masked_mean(x_BT, mask_BT), mask_BT)
    variance = centred_BT.square().sum() / (count - 1)
    return (centred_BT if centre else inside(x_BT, mask_BT)) * torch.rsqrt(variance + 1e-8)
