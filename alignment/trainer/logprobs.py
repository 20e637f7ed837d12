"""Log-probs of a batch's outputs under the policy as it stands, each rank doing its share."""

from collections.abc import Sequence

import torch
from torch import Tensor

from alignment.model import shard
from alignment.model.policy import Hat, PolicyModel
from alignment.trainer.lesson import output_mask
from alignment.trainer.packing import Scored, plan, rows


def score(policy: PolicyModel, sequences: Sequence[Scored], mask_BT: Tensor, hat: Hat = "actor", packing: str = "tree") -> Tensor:
    """Log-probs of the scored tokens of one micro-batch, 0 in the padding.  → [B, T]"""
    logprobs_N = policy(rows(sequences, mask_BT.device), hat)
    return torch.zeros_like(mask_BT).index_put(mask_BT.nonzero(as_tuple=True), logprobs_N)


@torch.no_grad()
def score_all(
    policy: PolicyModel, sequences: Sequence[Scored], groups: list[list[int]], mask_BT: Tensor, *, rank: int = 0, num_ranks: int = 1, hat: Hat = "actor", packing: str = "tree"
) -> Tensor:
    logprobs_BT = torch.zeros_like(mask_BT)
    for group in groups[rank::num_ranks]:
        present = group or [0]  # an empty micro-batch still takes part in the forward
        scored_BT = score(policy, [sequences[index] for index in present], mask_BT[present], hat)
        if group:
            logprobs_BT[group] = scored_BT
    return shard.sum_over_ranks(logprobs_BT) if num_ranks > 1 else logprobs_BT


def score_alone(policy: PolicyModel, sequences: Sequence[Scored], *, budget: int, rank: int = 0, num_ranks: int = 1, hat: Hat = "actor", packing: str = "tree") -> Tensor:
    mask_BT = output_mask(sequences, next(policy.parameters()).device)
    return score_all(policy, sequences, plan(sequences, budget, num_ranks), mask_BT, rank=rank, num_ranks=num_ranks, hat=hat)
