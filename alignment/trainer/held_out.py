"""The KL of an update on replies that it has not seen, which the KL guard reads.

On the replies that the optimizer steps were made on, an update looks larger or smaller than it is: its few largest
tokens are those that it was fitted to, and a batch may have a single reply of the parent. k3 is an unbiased estimate of
KL(parent ‖ new policy) on other replies of the parent.
"""

from collections.abc import Sequence

from alignment.data.collate import collate
from alignment.data.micro_batches import ScoredSequence, make_micro_batches
from alignment.models import parallel
from alignment.models.policy_model import PolicyModel
from alignment.trainer.metrics import UpdateKL
from alignment.types import Sample

MIN_TOKENS = 500  # with fewer the estimate says little: a few tokens are most of it


def make_held_out(policy: PolicyModel, samples: Sequence[Sample], max_tokens: int) -> UpdateKL | None:
    """Score the parent's replies by the parent, which the policy still is. All ranks must call it.

    Returns None where they have fewer than MIN_TOKENS output tokens. Replies with foreign token ids are left out.
    """
    own = [sample for sample in samples if max(*sample.prompt_ids, *sample.output_ids) < policy.num_token_ids]
    if sum(len(sample.output_ids) for sample in own) < MIN_TOKENS:
        return None
    sequences = [ScoredSequence.from_sample(sample) for sample in own]
    micro_batches = make_micro_batches(sequences, max_tokens, parallel.num_ranks(), packing=policy.packing)
    held_out = UpdateKL(
        policy, collate(own, policy.device), sequences, micro_batches, score_old=True, max_sequences=len(own)
    )
    return held_out if held_out.num_tokens >= MIN_TOKENS else None
