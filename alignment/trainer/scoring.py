"""Log-probs (the critic: values) of a batch's outputs under the policy as it stands, each rank doing its share."""

from collections.abc import Sequence

import torch
from torch import Tensor

from alignment.data.collate import output_mask
from alignment.data.micro_batches import Scored, plan, rows
from alignment.data.prefix_sharing import Packing
from alignment.models import parallel
from alignment.models.policy_model import ModelRole, PolicyModel


def score(
    policy: PolicyModel,
    sequences: Sequence[Scored],
    mask_BT: Tensor,
    hat: ModelRole = "actor",
    packing: Packing = "tree",
) -> Tensor:
    """What `hat` says of the scored tokens of one micro-batch, 0 in the padding.  → [B, T]"""
    scores_N = policy(rows(sequences, mask_BT.device, packing), hat)
    return torch.zeros_like(mask_BT).index_put(mask_BT.nonzero(as_tuple=True), scores_N)


@torch.no_grad()
def score_all(
    policy: PolicyModel,
    sequences: Sequence[Scored],
    groups: Sequence[Sequence[int]],
    mask_BT: Tensor,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    hat: ModelRole = "actor",
    packing: Packing = "tree",
) -> Tensor:
    """The same of all sequences, in the micro-batches of a plan, alike on every rank.  → [B, T]

    Scores depend, in their last bits, on what they were computed together with. With the micro-batches of the step to
    come they are bit for bit what that step will find.
    """
    scores_BT = torch.zeros_like(mask_BT)
    for group in groups[rank::num_ranks]:
        present = list(group) or [0]  # an empty micro-batch still takes part in the forward
        found_BT = score(policy, [sequences[index] for index in present], mask_BT[present], hat, packing)
        if group:
            scores_BT[present] = found_BT
    return parallel.sum_over_ranks(scores_BT) if num_ranks > 1 else scores_BT


def score_alone(
    policy: PolicyModel,
    sequences: Sequence[Scored],
    *,
    budget: int,
    rank: int = 0,
    num_ranks: int = 1,
    hat: ModelRole = "actor",
) -> Tensor:
    """The same where no step is to come, in micro-batches of up to `budget` tokens.  → [B, T]"""
    packing: Packing = "tree" if policy.masks_allowed else "chain"
    groups = plan(sequences, budget, num_ranks, packing=packing)
    mask_BT = output_mask(sequences, next(policy.parameters()).device)
    return score_all(policy, sequences, groups, mask_BT, rank=rank, num_ranks=num_ranks, hat=hat, packing=packing)
