"""Argument checks, masked means, whitening, and aggregation: one number from a loss per token."""

from typing import get_args

import torch
from torch import Tensor

from alignment.config.policy_gradient_algorithms import Aggregation
from alignment.errors import AlignmentError


def check_same_shape(**tensors: Tensor) -> None:
    """Raise ValueError, with every name and shape, unless all tensors have one shape.

    Broadcasting would turn a wrong shape into a wrong sum without an error.
    """
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"shapes do not match: {shapes}")


def check_literal(label: str, name: str, literal: object) -> None:
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


def whiten(x_BT: Tensor, mask_BT: Tensor, *, centre: bool = True, weights_B: Tensor | None = None) -> Tensor:
    """Return (x − mean) · rsqrt(var + 1e-8) over the masked tokens, var with Bessel's correction; 0 outside the mask.

    [B, T] → [B, T].  As in PPO implementations since Ziegler et al., 2019 (verl `masked_whiten`). With
    `centre=False` x is only scaled, to a root mean square of 1, x · rsqrt(mean(x²) + 1e-8): for values that a baseline
    has centred already. Nearly equal values then stay near ±1; divided by their deviation they would have no bound.
    With `weights_B`, above 0, a token has the weight of its row in the means; the result is not multiplied by it.
    Raises AlignmentError where the mask holds fewer than two tokens.
    """
    count = int(mask_BT.sum())
    if count < 2:
        raise AlignmentError(f"whitening needs at least two tokens, but the mask holds {count}")
    weights_BT = mask_BT if weights_B is None else mask_BT * weights_B[:, None]
    total, inside_BT = weights_BT.sum(), apply_mask(x_BT, mask_BT)
    if not centre:
        return inside_BT * torch.rsqrt((weights_BT * inside_BT.square()).sum() / total + 1e-8)
    centred_BT = apply_mask(x_BT - (weights_BT * inside_BT).sum() / total, mask_BT)
    variance = (weights_BT * centred_BT.square()).sum() / total * count / (count - 1)
    return centred_BT * torch.rsqrt(variance + 1e-8)


def aggregate(
    loss_BT: Tensor,
    mask_BT: Tensor,
    mode: Aggregation,
    *,
    denominator: float | Tensor | None = None,
    horizon: float | None = None,
) -> Tensor:
    """Aggregate a loss per token.  [B, T] → scalar, with l the loss, m the mask, n_i the tokens of sequence i:

    token-mean               Σ l·m / tokens
    token-sum                Σ l·m
    seq-mean-token-sum       Σ_i Σ_t l·m / sequences
    seq-mean-token-sum-norm  Σ_i Σ_t l·m / sequences / horizon      (Liu et al., 2025, Dr.GRPO; horizon in tokens)
    seq-mean-token-mean      Σ_i (Σ_t l·m / (n_i + 1e-8)) / sequences    (Shao et al., 2024, GRPO)

    `denominator` counts tokens (token-mean) or sequences (seq-…) over the whole minibatch, all micro-batches and
    ranks: the losses of the micro-batches then add up to the loss of the minibatch. None counts the tokens of this
    tensor, or its sequences that have tokens (verl `agg_loss`); token-sum has no denominator.
    Where gradients are averaged over ranks, the caller must multiply by the number of ranks.
    Raises ValueError for an unknown mode, and for seq-mean-token-sum-norm without a horizon.
    """
    check_literal("aggregation", mode, Aggregation)
    check_same_shape(loss_BT=loss_BT, mask_BT=mask_BT)
    if mode == "seq-mean-token-sum-norm" and (horizon is None or horizon <= 0):
        raise ValueError(f"seq-mean-token-sum-norm needs a horizon in tokens, above 0; got {horizon}")
    sum_B = apply_mask(loss_BT, mask_BT).sum(-1)
    if mode == "token-sum":
        return sum_B.sum()
    tokens_B = mask_BT.sum(-1).to(loss_BT.dtype)
    if mode == "token-mean":
        return sum_B.sum() / (tokens_B.sum() if denominator is None else denominator)
    if mode == "seq-mean-token-mean":
        sum_B = sum_B / (tokens_B + 1e-8)
    mean = sum_B.sum() / ((tokens_B > 0).sum() if denominator is None else denominator)
    return mean / horizon if mode == "seq-mean-token-sum-norm" and horizon else mean
