"""Log-probs of a batch's outputs under the policy as it stands, each rank doing its share."""

from collections.abc import Sequence

import torch
from torch import Tensor

from alignment.model import shard
from alignment.model.policy import PolicyModel
from alignment.trainer.lesson import output_mask
from alignment.trainer.packing import Scored, plan, rows


def score(policy: PolicyModel, sequences: Sequence[Scored], mask_BT: Tensor) -> Tensor:
    """Log-probs of the scored tokens of one micro-batch, 0 in the padding.  → [B, T]"""
    logprobs_N = policy(rows(sequences, mask_BT.device))
    return torch.zeros_like(mask_BT).index_put(mask_BT.nonzero(as_tuple=True), logprobs_N)


@torch.no_grad()
def score_all(
    policy: PolicyModel, sequences: Sequence[Scored], *, budget: int, rank: int = 0, num_ranks: int = 1
) -> Tensor:
    """Log-probs of the scored tokens of all sequences, the same on every rank.  → [B, T]"""
    mask_BT = output_mask(sequences, next(policy.parameters()).device)
    logprobs_BT = torch.zeros_like(mask_BT)
    for group in plan(sequences, budget, num_ranks)[rank::num_ranks]:
        present = group or [0]  # an empty micro-batch still takes part in the forward
        scored_BT = score(policy, [sequences[index] for index in present], mask_BT[present])
        if group:
            logprobs_BT[group] = scored_BT
    return shard.sum_over_ranks(logprobs_BT) if num_ranks > 1 else logprobs_BT
