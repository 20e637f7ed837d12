"""Aggregation: one number from a loss per token."""

from torch import Tensor

from alignment.config.algorithm import Aggregation
from alignment.functional.masks import apply_mask, check_literal, check_same_shape


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
