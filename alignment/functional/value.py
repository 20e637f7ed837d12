"""The loss of the critic."""

from typing import NamedTuple

import torch
from torch import Tensor

from alignment.config.algorithm import Aggregation
from alignment.functional.aggregation import aggregate
from alignment.functional.masks import apply_mask, check_same_shape


class ValueLoss(NamedTuple):
    """The loss, and 1 for every token whose loss is the clipped one."""

    loss: Tensor
    clipped_BT: Tensor


def value_loss(
    values_BT: Tensor,
    old_values_BT: Tensor,
    returns_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip: float | None,
    aggregation: Aggregation = "token-mean",
    denominator: float | Tensor | None = None,
    horizon: float | None = None,
) -> ValueLoss:
    """Return aggregate(½ · max((V − R)², (clamp(V, V_old ± clip) − R)²), mask).  [B, T] → scalar and [B, T].

    `clip` is in units of the rewards; `clip=None` gives ½·(V − R)². See `aggregate` for `aggregation`, `denominator`
    and `horizon`.  Schulman et al., 2017, as in verl and OpenRLHF.
    Raises ValueError for mismatched shapes and for a clip that is not above 0.
    """
    check_same_shape(values_BT=values_BT, old_values_BT=old_values_BT, returns_BT=returns_BT, mask_BT=mask_BT)
    if clip is not None and clip <= 0:
        raise ValueError(f"clip must be above 0, not {clip}: None turns it off")
    values_BT = apply_mask(values_BT, mask_BT)
    old_BT = apply_mask(old_values_BT.detach(), mask_BT)
    returns_BT = apply_mask(returns_BT.detach(), mask_BT)
    unclipped_BT = (values_BT - returns_BT).square()
    clipped_error_BT = unclipped_BT
    if clip is not None:
        # old + clamp(V − old) is not exactly V within the bounds, so rounding would mark tokens as clipped.
        clipped_error_BT = (values_BT.clamp(old_BT - clip, old_BT + clip) - returns_BT).square()
    loss_BT = 0.5 * torch.maximum(unclipped_BT, clipped_error_BT)
    return ValueLoss(
        aggregate(loss_BT, mask_BT, aggregation, denominator=denominator, horizon=horizon),
        (clipped_error_BT > unclipped_BT).to(loss_BT.dtype),
    )
