"""Samples, batches, micro-batches and update reports: what travels between the assembler, the trainer and algorithms.

This module does not import torch when it runs, so `app` may import it. Tensor suffixes: B samples, T output tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from alignment.errors import MisalignedSample, NoVariance

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Sample:
    """One turn with the token ids and log-probs that the engine recorded, and its reward.

    Example: Sample(turn_id="chatcmpl-7", prompt_ids=(1, 5), output_ids=(9, 2), logprobs=(-0.1, -1.3),
                    reward=1.0, version=3, temperature=0.7)
    """

    turn_id: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # of the behaviour policy, at `temperature`, one per output token
    reward: float
    version: int  # the n of the version `{policy}-v{n}` that sampled it; 0 is the base model
    temperature: float = 1.0
    lag: int = 0  # versions between the one that sampled it and the one that is trained
    group: str | None = None  # replies to the same prompt have the same group
    conversation: str | None = None
    turn_index: int = 0  # position in the conversation

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise MisalignedSample(f"Turn {self.turn_id} has no prompt tokens.")
        if not self.output_ids:
            raise MisalignedSample(f"Turn {self.turn_id} has no output tokens.")
        if len(self.logprobs) != len(self.output_ids):
            raise MisalignedSample(
                f"Turn {self.turn_id} has {len(self.output_ids)} tokens but {len(self.logprobs)} log-probs."
            )
        if not all(math.isfinite(logprob) for logprob in self.logprobs):
            raise MisalignedSample(f"Turn {self.turn_id} has a log-prob that is not finite.")
        if not math.isfinite(self.reward):
            raise MisalignedSample(f"Turn {self.turn_id} has a reward that is not finite.")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise MisalignedSample(f"Turn {self.turn_id} was sampled at temperature {self.temperature}.")

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)


@dataclass(frozen=True)
class Batch:
    """A frozen set of samples for one update of one policy."""

    id: str
    policy: str
    samples: tuple[Sample, ...]


def check_variance(rewards: Sequence[float]) -> None:
    """Raise NoVariance unless there are two different rewards."""
    if len(rewards) < 2:
        raise NoVariance(f"A batch of {len(rewards)} samples has nothing to compare.")
    if min(rewards) == max(rewards):
        raise NoVariance(f"All {len(rewards)} rewards are {rewards[0]}, so no reply is better than another.")


@dataclass
class TrainData:
    """A batch as tensors: B samples of up to T output tokens, the same on every rank.

    A tensor that the algorithm does not need is None. The last three fields are for `before_train_step` to fill.
    """

    samples: Sequence[Sample]
    mask_BT: Tensor  # 1 where there is an output token, 0 in the padding
    rewards_B: Tensor
    rollout_logprobs_BT: Tensor  # log-probs that the engine recorded
    old_logprobs_BT: Tensor | None = None  # log-probs of the policy before the update
    ref_logprobs_BT: Tensor | None = None  # log-probs of the base model
    values_BT: Tensor | None = None  # the critic's value before each token
    advantages_BT: Tensor | None = None
    returns_BT: Tensor | None = None
    extra: dict[str, Tensor] = field(default_factory=dict)  # the algorithm's own tensors; the first dimension is B

    def take(self, indices: Sequence[int]) -> TrainData:
        """Return the rows of these samples. The padding stays."""
        rows = list(indices)

        def of(tensor_B: Tensor | None) -> Tensor | None:
            return None if tensor_B is None else tensor_B[rows]

        return TrainData(
            samples=[self.samples[index] for index in rows],
            mask_BT=self.mask_BT[rows],
            rewards_B=self.rewards_B[rows],
            rollout_logprobs_BT=self.rollout_logprobs_BT[rows],
            old_logprobs_BT=of(self.old_logprobs_BT),
            ref_logprobs_BT=of(self.ref_logprobs_BT),
            values_BT=of(self.values_BT),
        )

    @cached_property
    def group_B(self) -> Tensor:
        """Return an integer group label for each sample. A sample without a group has a label of its own."""
        numbers: dict[str, int] = {}
        names = [sample.group or f"alone {index}" for index, sample in enumerate(self.samples)]
        return self.mask_BT.new_tensor([numbers.setdefault(name, len(numbers)) for name in names]).long()

    @cached_property
    def length_B(self) -> Tensor:
        """Return the number of output tokens of each sample."""
        return self.mask_BT.sum(-1)


@dataclass(frozen=True)
class MicroBatch:
    """The rows of a batch that one forward pass scores.

    A sum over a minibatch must be divided by `num_tokens` or `num_sequences`, which count the whole minibatch over all
    micro-batches and ranks. The losses and metrics of the micro-batches then add up to those of the minibatch.
    """

    batch: TrainData
    row_indices: tuple[int, ...]  # samples of the batch
    scored_BT: Tensor  # carries the gradient
    num_tokens: int
    num_sequences: int
    minibatch_indices: tuple[int, ...]  # samples of all micro-batches of the minibatch

    @property
    def logprobs_BT(self) -> Tensor:
        """Return the log-probs of the current policy. Use it in `compute_loss`."""
        return self.scored_BT

    @property
    def values_BT(self) -> Tensor:
        """Return the values of the current critic. Use it in `compute_value_loss`."""
        return self.scored_BT

    @property
    def mask_BT(self) -> Tensor:
        return self.rows(self.batch.mask_BT)

    def rows(self, tensor_B: Tensor | None) -> Tensor:
        """Return the rows of this micro-batch from a tensor of the whole batch."""
        assert tensor_B is not None, "the algorithm did not ask for this tensor"
        return tensor_B[list(self.row_indices)]


@dataclass(frozen=True)
class UpdateReport:
    """The result of one update.

    `actor/*` metrics are means over all optimizer steps. `reference_kl` is the mean over the last epoch, which is
    closest to the new policy; it is missing where the algorithm has no reference.

    Example: UpdateReport(batch_id="b-1", updates=4, metrics={"actor/pg_loss": -0.01, "reference_kl": 0.02})
    """

    batch_id: str
    updates: int
    metrics: dict[str, float]
    unused_turn_ids: tuple[str, ...] = ()  # ids of the turns that the algorithm could not use
