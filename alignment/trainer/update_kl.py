"""The KL divergence of an update: how far the new policy is from the one before. The KL guard reads it."""

import math
from collections.abc import Sequence

import torch

from alignment.data.micro_batches import ScoredSequence
from alignment.data.prefix_sharing import Packing
from alignment.errors import NonFiniteUpdate
from alignment.functional import kl_estimate
from alignment.models.policy_model import PolicyModel
from alignment.trainer.scoring import score_micro_batches
from alignment.types import TrainData

MIN_SEQUENCES = 32


@torch.no_grad()
def measure_update_kl(
    policy: PolicyModel,
    data: TrainData,
    sequences: Sequence[ScoredSequence],
    micro_batches: Sequence[Sequence[int]],
    *,
    rank: int = 0,
    num_ranks: int = 1,
    packing: Packing = "tree",
) -> dict[str, float]:
    """Return `guard/kl`, the k3 estimate of KL(old ‖ new policy) in nats per token, and its `guard/tokens`.

    It is measured on part of the batch: replies of the old policy if there are any, because the mean of k3 over a
    policy's own samples is an unbiased estimate of its KL to another policy (Schulman, 2020); otherwise replies of
    earlier versions. Without log-probs of the old policy the recorded log-probs are used. All ranks must call it with
    the same `micro_batches`. Raises NonFiniteUpdate.
    """
    samples = data.samples
    usable = {index for index, sample in enumerate(samples) if sample.lag == 0} or set(range(len(samples)))
    selected: list[Sequence[int]] = []
    num_usable = 0
    for start in range(0, len(micro_batches), num_ranks):  # each rank gets equally many micro-batches
        block = micro_batches[start : start + num_ranks]
        count = sum(index in usable for micro_batch in block for index in micro_batch)
        selected += block if count else []
        num_usable += count
        if num_usable >= MIN_SEQUENCES:
            break
    new_logprobs_BT = score_micro_batches(
        policy, sequences, selected, data.mask_BT, rank=rank, num_ranks=num_ranks, packing=packing
    )
    rows = sorted(index for micro_batch in selected for index in micro_batch if index in usable)
    old_logprobs_BT = data.rollout_logprobs_BT if data.old_logprobs_BT is None else data.old_logprobs_BT
    mask_BT = data.mask_BT[rows]
    kl_BT = kl_estimate(old_logprobs_BT[rows], new_logprobs_BT[rows], "k3") * mask_BT
    kl, tokens = float(kl_BT.sum() / mask_BT.sum()), float(mask_BT.sum())
    if not math.isfinite(kl):
        raise NonFiniteUpdate(f"The KL divergence of the update is {kl}; the policy was not changed.")
    return {"guard/kl": kl, "guard/tokens": tokens}
