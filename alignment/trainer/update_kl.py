"""The KL of an update, KL(parent ‖ new policy) per token, which its size is fitted to and the KL guard reads.

On the replies that the optimizer steps were made on, an update looks larger or smaller than it is elsewhere. So it is
measured on other recorded replies: one part of them for the search of the size, another for the guard, which would
otherwise read the number that the search has made small. At every token of a reply the two distributions of the next
token are compared, not the log-probs of the token that was drawn: a few rare tokens were most of such an estimate. So a
reply need not be the parent's own, because its tokens are only the places where the distributions are compared.

Tensor suffixes: N tokens of a micro-batch, K likely tokens of the vocabulary.
"""

from collections.abc import Sequence

import torch

from alignment.data.micro_batches import ScoredSequence, make_micro_batches, make_model_inputs
from alignment.functional import distribution_kl
from alignment.models import parallel
from alignment.models.base_model import ModelInputs
from alignment.models.lm_head import LikelyTokens
from alignment.models.policy_model import PolicyModel
from alignment.types import Sample

NUM_LIKELY_TOKENS = 1024  # of the parent's at each place; all others count as one
MIN_TOKENS = 500  # with fewer output tokens a part of the held-out replies is not used
MAX_TOKENS = 2000  # output tokens that are compared: 12 bytes for each of the likely tokens, 25 MB in all


class UpdateKL:
    """Measures KL(old ‖ current policy), in nats per token, at the output tokens of some replies.

    The tokens of the vocabulary that are not among the old policy's 1,024 likeliest count as one, which makes the KL
    smaller, but hardly (`distribution_kl`). Every rank keeps the old distributions of its own micro-batches.
    """

    @torch.no_grad()
    def __init__(self, policy: PolicyModel, samples: Sequence[Sample], max_tokens: int) -> None:
        """Record the distributions of the policy as it is now, at the first MAX_TOKENS output tokens.

        `max_tokens` is the size of a micro-batch. All ranks must pass the same samples.
        """
        self.policy, self.sequences = policy, _cut(samples, MAX_TOKENS)
        self.num_tokens = min(_num_output_tokens(samples), MAX_TOKENS)
        self.micro_batches = make_micro_batches(
            self.sequences, max_tokens, parallel.num_ranks(), packing=policy.packing
        )[parallel.rank() :: parallel.num_ranks()]
        self.old: list[LikelyTokens] = [
            policy(self._make_inputs(micro_batch), num_likely_tokens=NUM_LIKELY_TOKENS)
            for micro_batch in self.micro_batches
        ]

    @torch.no_grad()
    def measure(self) -> float:
        """Return the KL of the current policy, which may not be finite. All ranks call it and get the same value."""
        total = torch.zeros((), dtype=torch.float64, device=self.policy.device)
        for micro_batch, old in zip(self.micro_batches, self.old, strict=True):
            new_NK = self.policy(self._make_inputs(micro_batch), token_ids_NK=old.ids_NK)
            if micro_batch:
                total += distribution_kl(old.logprobs_NK, new_NK).sum()
        return float(parallel.sum_over_ranks(total)) / self.num_tokens

    def _make_inputs(self, micro_batch: Sequence[int]) -> ModelInputs:
        """A rank with an empty micro-batch still takes part in the forward pass."""
        sequences = [self.sequences[index] for index in micro_batch or [0]]
        return make_model_inputs(sequences, self.policy.device, self.policy.packing)


def split_held_out(samples: Sequence[Sample], num_token_ids: int) -> tuple[list[Sample], list[Sample]]:
    """Return the held-out replies for the search of the size and those for the guard, alternately.

    A part has at least MIN_TOKENS output tokens or none; where there are too few replies for two parts, the guard gets
    all of them. Replies with foreign token ids are left out.
    """
    own = [sample for sample in samples if max(*sample.prompt_ids, *sample.output_ids) < num_token_ids]
    search, guard = own[::2], own[1::2]
    if min(_num_output_tokens(search), _num_output_tokens(guard)) >= MIN_TOKENS:
        return search, guard
    return [], own if _num_output_tokens(own) >= MIN_TOKENS else []


def _num_output_tokens(samples: Sequence[Sample]) -> int:
    return sum(len(sample.output_ids) for sample in samples)


def _cut(samples: Sequence[Sample], max_output_tokens: int) -> list[ScoredSequence]:
    """Return the samples up to so many output tokens. The last one may lack the end of its output."""
    sequences: list[ScoredSequence] = []
    left = max_output_tokens
    for sample in samples:
        if left <= 0:
            break
        sequence = ScoredSequence.from_sample(sample)
        sequences.append(sequence._replace(ids=sequence.ids[: sequence.start + left]))
        left -= len(sample.output_ids)
    return sequences
