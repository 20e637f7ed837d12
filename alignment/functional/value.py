"""The critic's loss."""

from typing import NamedTuple

import torch
from torch import Tensor

from alignment.config.algorithm import Aggregation
from alignment.functional.aggregation import aggregate
from alignment.functional.arguments import same_shape
from alignment.functional.masks import inside


class ValueLoss(NamedTuple):
    """The loss to go backward from, and 1 for every token where the clip was what decided it."""

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
    """aggregate(½ · max((V − R)², (clamp(V, V_old ± clip) − R)²), mask).  [B, T] → scalar and [B, T].

    Units are those of the rewards; `clip=None` leaves ½·(V − R)². `aggregation`, `denominator` and `horizon` are those
    of `aggregate`.  Schulman et al., 2017, as verl and OpenRLHF have it.
    Raises ValueError for shapes that do not match and for a clip that is not above 0.
    """
    same_shape(values_BT=values_BT, old_values_BT=old_values_BT, returns_BT=returns_BT, mask_BT=mask_BT)
    if clip is not None and clip <= 0:
        raise ValueError(f"clip must be above 0, not {clip}: None turns it off")
    values_BT = inside(values_BT, mask_BT)
    old_BT = inside(old_values_BT.detach(), mask_BT)
    returns_BT = inside(returns_BT.detach(), mask_BT)
    free_BT = (values_BT - returns_BT).square()
    bounded_BT = free_BT
    if clip is not None:
        # Not old + clamp(V − old), which is not exactly V within the bounds, and would mark tokens by their rounding.
        bounded_BT = (values_BT.clamp(old_BT - clip, old_BT + clip) - returns_BT).square()
    loss_BT = 0.5 * torch.maximum(free_BT, bounded_BT)
    return ValueLoss(
        aggregate(loss_BT, mask_BT, aggregation, denominator=denominator, horizon=horizon),
        (bounded_BT > free_BT).to(loss_BT.dtype),
    )
