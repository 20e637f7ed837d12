"""Finds the samples that the policy cannot have generated: foreign token ids, or log-probs of other weights.

Such a turn is left out, with its reason, and the rest of the batch is trained on. Where more than half of the replies
of the policy before the update, and more than one, have foreign log-probs, the weights in question are wrong, not the
turns: then the whole batch is refused.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from alignment.config.trainer import TrainerConfig
from alignment.errors import ForeignSamples
from alignment.types import Sample, TrainData

# The mismatch of one reply varies more than the mean of a batch, so its limit is larger by this factor.
SAMPLE_MISMATCH_FACTOR = 4.0
MIN_TOKENS = 8  # a shorter reply counts as so long, so that the noise of one token does not exclude it


def check_token_ids(samples: Sequence[Sample], num_ids: int) -> None:
    """Raise ForeignSamples for the turns with a token id that is not one of the model's, 0 to `num_ids` - 1."""
    foreign = {
        sample.turn_id: f"it has token ids that the base model does not have (0 to {num_ids - 1}): of another tokenizer"
        for sample in samples
        if not all(0 <= id < num_ids for id in (*sample.prompt_ids, *sample.output_ids))
    }
    if foreign:
        raise ForeignSamples(_describe(foreign), foreign)


def check_mismatch(samples: Sequence[Sample], data: TrainData, old_logprobs_BT: Tensor, config: TrainerConfig) -> None:
    """Compare the recorded log-probs with those of the policy before the update.

    Each sample of that policy is checked, because a mean hides a single one, and then the mean of those samples. Those
    of other versions differ for a good reason, and importance weights correct for it. Raises ForeignSamples.
    """
    mask_BT = data.response_mask_BT
    difference_BT = (old_logprobs_BT - data.rollout_logprobs_BT).abs() * mask_BT
    mismatch_B = difference_BT.sum(-1) / data.length_B.clamp(min=MIN_TOKENS)
    limit = SAMPLE_MISMATCH_FACTOR * config.max_mismatch
    foreign = {
        sample.turn_id: f"its recorded log-probs differ by {mismatch:.3g} nats per token from those of the policy that "
        f"should have generated it (limit {limit:g}): they come from other weights"
        for sample, mismatch in zip(samples, mismatch_B.tolist(), strict=True)
        if sample.lag == 0 and not mismatch <= limit
    }
    num_fresh = sum(sample.lag == 0 for sample in samples)  # others are not checked one by one
    if foreign:
        if len(foreign) < len(samples) and (len(foreign) == 1 or 2 * len(foreign) <= num_fresh):
            raise ForeignSamples(_describe(foreign), foreign)
        raise ForeignSamples(f"{len(foreign)} of {num_fresh} replies of this policy are foreign. {_describe(foreign)}")
    own = [index for index, sample in enumerate(samples) if sample.lag == 0]
    if not own:
        return
    mean_mismatch = float(difference_BT[own].sum() / mask_BT[own].sum())
    if not mean_mismatch <= config.max_mismatch:
        raise ForeignSamples(
            f"The recorded log-probs differ by {mean_mismatch:.3g} nats per token from those of the policy before the "
            f"update (max_mismatch is {config.max_mismatch:g}): the samples were generated with other weights "
            "or at another temperature."
        )


def _describe(foreign: Mapping[str, str]) -> str:
    turn_id, reason = next(iter(foreign.items()))
    others = f", and {len(foreign) - 1} more turns are foreign" if len(foreign) > 1 else ""
    return f"Turn {turn_id}: {reason}{others}."
