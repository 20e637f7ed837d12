"""Score sequences: the log-probs of a batch's outputs (for the critic: values), distributed over the ranks.

Tensor suffixes: B sequences, T scored tokens of a sequence, padded on the right.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from alignment.data.collate import output_mask
from alignment.data.micro_batches import ScoredSequence, make_micro_batches, make_model_inputs
from alignment.data.prefix_sharing import Packing
from alignment.models import parallel
from alignment.models.policy_model import ModelRole, PolicyModel


def score_micro_batch(
    policy: PolicyModel,
    sequences: Sequence[ScoredSequence],
    mask_BT: Tensor,
    role: ModelRole = "actor",
    packing: Packing = "tree",
) -> Tensor:
    """Return the role's log-probs (nats) or values of the scored tokens of one micro-batch, 0 in the padding.

    → [B, T] float32, with a gradient if enabled.
    """
    scores_N = policy(make_model_inputs(sequences, mask_BT.device, packing), role)
    return torch.zeros_like(mask_BT).index_put(mask_BT.nonzero(as_tuple=True), scores_N)


@torch.no_grad()
def score_micro_batches(
    policy: PolicyModel,
    sequences: Sequence[ScoredSequence],
    micro_batches: Sequence[Sequence[int]],
    mask_BT: Tensor,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    role: ModelRole = "actor",
    packing: Packing = "tree",
) -> Tensor:
    """Return the scores of all sequences in the given micro-batches, without a gradient.  → [B, T] float32

    All ranks must call it with the same arguments, and each gets the same result. A score depends, in its last bits, on
    what it is computed together with: in the micro-batches of the next optimizer step the scores equal those of that
    step bit for bit.
    """
    scores_BT = torch.zeros_like(mask_BT)
    for micro_batch in micro_batches[rank::num_ranks]:
        present = list(micro_batch) or [0]  # a rank with an empty micro-batch still takes part in the forward pass
        micro_batch_BT = score_micro_batch(
            policy, [sequences[index] for index in present], mask_BT[present], role, packing
        )
        if micro_batch:
            scores_BT[present] = micro_batch_BT
    return parallel.sum_over_ranks(scores_BT) if num_ranks > 1 else scores_BT


def score_sequences(
    policy: PolicyModel,
    sequences: Sequence[ScoredSequence],
    *,
    max_tokens: int,
    rank: int = 0,
    num_ranks: int = 1,
    role: ModelRole = "actor",
) -> Tensor:
    """Return the scores of sequences outside of an update, in micro-batches of up to `max_tokens` tokens.  → [B, T]

    All ranks must call it with the same arguments, and each gets the same result.
    """
    packing: Packing = "tree" if policy.supports_attention_mask else "chain"
    micro_batches = make_micro_batches(sequences, max_tokens, num_ranks, packing=packing)
    mask_BT = output_mask(sequences, next(policy.parameters()).device)
    return score_micro_batches(
        policy, sequences, micro_batches, mask_BT, rank=rank, num_ranks=num_ranks, role=role, packing=packing
    )
