"""How far an update has taken the policy from its parent: what the KL guard goes by."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from alignment.errors import NonFiniteUpdate
from alignment.functional import kl_estimate
from alignment.trainer.scoring import score_all

if TYPE_CHECKING:
    from alignment.trainer.update import Update

ENOUGH = 32  # sequences


@torch.no_grad()
def moved(update: Update, groups: list[list[int]]) -> dict[str, float]:
    """`guard/kl`, nats a token: k3 of KL(parent ‖ the policy that came out), and over how many tokens.

    Measured on a part of the batch: replies of the parent itself where there are any, for the mean of k3 over what a
    policy said is an unbiased estimate of its KL to another (Schulman, 2020); else replies of the versions before it.
    Where the parent was not scored its recorded log-probs stand in. All ranks call, with the same `groups`. Raises
    NonFiniteUpdate.
    """
    ranks, samples, data = update.learner.num_ranks, update.samples, update.data
    own = {index for index, sample in enumerate(samples) if sample.lag == 0} or set(range(len(samples)))
    few: list[list[int]] = []
    seen = 0
    for start in range(0, len(groups), ranks):  # as many groups for each rank
        block = groups[start : start + ranks]
        found = sum(index in own for group in block for index in group)
        few += block if found else []
        seen += found
        if seen >= ENOUGH:
            break
    now_BT = score_all(
        update.learner.policy,
        update.sequences,
        few,
        data.mask_BT,
        rank=update.learner.rank,
        num_ranks=ranks,
        packing=update.packing,
    )
    rows = sorted(index for group in few for index in group if index in own)
    told_BT = data.rollout_BT if data.parent_BT is None else data.parent_BT
    mask_BT = data.mask_BT[rows]
    kl_BT = kl_estimate(told_BT[rows], now_BT[rows], "k3") * mask_BT
    distance, tokens = float(kl_BT.sum() / mask_BT.sum()), float(mask_BT.sum())
    if not math.isfinite(distance):
        raise NonFiniteUpdate(f"The distance to the parent is {distance}: the guard has nothing to go by.")
    return {"guard/kl": distance, "guard/tokens": tokens}
