"""Samples, batches, micro-batches, losses and update reports: what travels between assembler, trainer and algorithms.

This module does not import torch when it runs, so `app` may import it. Tensor suffixes: B samples, T output tokens.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

from alignment.corrected_text import TextRule
from alignment.errors import MisalignedSample, NoVariance
from alignment.tolerance import is_tie

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
    group: str | None = None  # replies to the same prompt have the same group, and episodes of the same task
    conversation: str | None = None
    turn_index: int = 0  # position in the conversation
    episode: str | None = None  # the turns of an agent's attempt at a task have the same episode
    agent: str | None = None  # the agent's name in the episode, such as planner or worker
    state_key: str | None = None  # the state of the environment before the reply, as the client names it
    depth: int | None = None  # of a turn whose reward is a return: how many turns of its episode it goes on from
    parent: str | None = None  # of such a turn: the turn that it goes on from, which need not be in the batch
    num_next: int = 0  # of such a turn: how many turns of its episode go on from it, in the batch or not
    turn_reward: float | None = None  # of such a turn: what it adds to its return
    turn_return: float | None = None  # of a turn of a compared episode, whose reward is that of the whole episode
    weight: float = 1.0  # confidence in the reward, relative to other samples; multiplies the loss, not the reward

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
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise MisalignedSample(f"Turn {self.turn_id} has the weight {self.weight}.")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise MisalignedSample(f"Turn {self.turn_id} was sampled at temperature {self.temperature}.")

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)


@dataclass(frozen=True)
class CorrectedReply:
    """A better text that somebody wrote for a reply: the pair (`text`, the reply of `sample`) to learn from.

    Example: CorrectedReply(id="fb-7", sample=sample, reply="We open at 9.", text="We open at 8.", weight=0.5)
    """

    id: str  # of the feedback
    sample: Sample  # the reply as it was served
    reply: str  # its text
    text: str
    weight: float = 1.0  # confidence in whoever wrote it, relative to other corrections


@dataclass(frozen=True)
class Batch:
    """A frozen set of samples for one update of one policy.

    `corrected` are better texts for replies of the samples. `held_out` are other replies of the policy, the newest
    first, of any version. Nothing is learned from them: the KL of the update is measured on them.
    """

    id: str
    policy: str
    samples: tuple[Sample, ...]
    held_out: tuple[Sample, ...] = ()
    corrected: tuple[CorrectedReply, ...] = ()

    def without(self, turn_ids: Collection[str]) -> Batch:
        """Return the batch without these turns."""
        return replace(
            self,
            samples=tuple(sample for sample in self.samples if sample.turn_id not in turn_ids),
            corrected=tuple(one for one in self.corrected if one.sample.turn_id not in turn_ids),
        )


def check_variance(rewards: Sequence[float]) -> None:
    """Raise NoVariance unless there are two different rewards."""
    if len(rewards) < 2:
        raise NoVariance(f"A batch of {len(rewards)} samples has nothing to compare.")
    if is_tie(rewards):
        raise NoVariance(f"All {len(rewards)} rewards are {rewards[0]:g}, so no reply is better than another.")


@dataclass
class TrainData:
    """A batch as tensors: B samples of up to T output tokens, the same on every rank.

    A tensor that the algorithm does not need is None. `advantages_BT` comes from `compute_advantages`; an algorithm may
    fill `returns_BT` and `extra`.
    """

    samples: Sequence[Sample]
    response_mask_BT: Tensor  # 1 where there is an output token, 0 in the padding
    rewards_B: Tensor
    rollout_logprobs_BT: Tensor  # log-probs that the engine recorded
    weights_B: Tensor | None = None  # of the samples, with a mean of 1 over the batch; None: all are equal
    old_logprobs_BT: Tensor | None = None  # log-probs of the policy before the update
    ref_logprobs_BT: Tensor | None = None  # log-probs of the base model
    values_BT: Tensor | None = None  # the critic's value before each token, before the update
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
            response_mask_BT=self.response_mask_BT[rows],
            rewards_B=self.rewards_B[rows],
            rollout_logprobs_BT=self.rollout_logprobs_BT[rows],
            weights_B=of(self.weights_B),
            old_logprobs_BT=of(self.old_logprobs_BT),
            ref_logprobs_BT=of(self.ref_logprobs_BT),
            values_BT=of(self.values_BT),
        )

    @cached_property
    def group_B(self) -> Tensor:
        """Return an integer group label for each sample. A sample without a group has a label of its own."""
        numbers: dict[str, int] = {}
        names = [sample.group or f"alone {index}" for index, sample in enumerate(self.samples)]
        return self.response_mask_BT.new_tensor([numbers.setdefault(name, len(numbers)) for name in names]).long()

    @cached_property
    def attempt_B(self) -> Tensor:
        """Return an integer label of each sample's episode. A reply without one has a label of its own."""
        numbers: dict[str, int] = {}
        names = [sample.episode or f"alone {index}" for index, sample in enumerate(self.samples)]
        return self.response_mask_BT.new_tensor([numbers.setdefault(name, len(numbers)) for name in names]).long()

    @cached_property
    def length_B(self) -> Tensor:
        """Return the number of output tokens of each sample."""
        return self.response_mask_BT.sum(-1)


@dataclass(frozen=True)
class BatchRows:
    """The samples of a batch that one forward pass scores, and the rows of the batch's tensors for them.

    A tensor that the algorithm did not ask for raises ValueError, which names the flag that asks for it.
    """

    batch: TrainData
    row_indices: tuple[int, ...]  # samples of the batch
    coupled_rows: tuple[tuple[int, ...], ...]  # the sets of `coupled_samples`, as positions in this micro-batch

    @property
    def response_mask_BT(self) -> Tensor:
        return self.rows(self.batch.response_mask_BT)

    @property
    def rewards_B(self) -> Tensor:
        return self.rows(self.batch.rewards_B)

    @property
    def weights_B(self) -> Tensor:
        """Return the confidence in each sample's reward, with a mean of 1 over the batch. The trainer applies it."""
        weights_B = self.batch.weights_B
        return self.rewards_B.new_ones(len(self.row_indices)) if weights_B is None else self.rows(weights_B)

    @property
    def rollout_logprobs_BT(self) -> Tensor:
        return self.rows(self.batch.rollout_logprobs_BT)

    @property
    def old_logprobs_BT(self) -> Tensor:
        return self.rows(self.batch.old_logprobs_BT, "needs_old_logprobs = True")

    @property
    def ref_logprobs_BT(self) -> Tensor:
        return self.rows(self.batch.ref_logprobs_BT, "needs_reference = True")

    @property
    def old_values_BT(self) -> Tensor:
        return self.rows(self.batch.values_BT, "needs_critic = True")

    @property
    def advantages_BT(self) -> Tensor:
        return self.rows(self.batch.advantages_BT, "compute_advantages")

    @property
    def returns_BT(self) -> Tensor:
        return self.rows(self.batch.returns_BT, "returns_BT in compute_advantages")

    def rows(self, tensor_B: Tensor | None, source: str = "it in before_train_step") -> Tensor:
        """Return the rows of this micro-batch from a tensor of the whole batch. `source` is what would have set it."""
        if tensor_B is None:
            raise ValueError(f"the batch does not have this tensor: the algorithm must set {source}")
        return tensor_B[list(self.row_indices)]


@dataclass(frozen=True)
class MicroBatch(BatchRows):
    """The input of `compute_loss`: rows of the batch, with what the current policy gives to their tokens.

    `logprobs_BT` carries the gradient, and so does `entropy_BT`, which exists with `needs_entropy`.
    """

    logprobs_BT: Tensor
    entropy_or_none_BT: Tensor | None = None

    @property
    def entropy_BT(self) -> Tensor:
        """Return the entropy of the distribution that each token was sampled from, in nats."""
        if self.entropy_or_none_BT is None:
            raise ValueError("the entropy is not computed: the algorithm must set needs_entropy = True")
        return self.entropy_or_none_BT


@dataclass(frozen=True)
class CriticMicroBatch(BatchRows):
    """The input of `compute_value_loss`: rows of the batch, with the values of the critic, which carry the gradient."""

    values_BT: Tensor


@dataclass(frozen=True)
class Metric:
    """A sum, and the number of things that it is over. The trainer adds up both and reports the mean."""

    sum: Tensor
    count: Tensor | float


class Regularizer(NamedTuple):
    """A second loss: `coef` times `loss_BT`, one value per token, aggregated like the first."""

    coef: float
    loss_BT: Tensor


LossUnit = Literal["token", "sequence", "coupled_set"]


@dataclass(frozen=True)
class LossOutput:
    """What `compute_loss` returns: losses that are not summed or averaged yet. The trainer does both.

    `loss` has one value per token, [B, T], per reply, [B], or, with `unit="coupled_set"`, per set of `coupled_rows`.
    The trainer masks the padding, and divides by counts over all micro-batches and ranks of the optimizer step.
    `metrics` by name: one value per token, [B, T], or a vector, whose mean is reported; or a `Metric`. The names must
    be the same for every micro-batch.
    `regularizers` by the name of their metric, such as a KL to the base model.
    `coef` multiplies the loss, but not its metric.

    Example: LossOutput(-inputs.advantages_BT * inputs.logprobs_BT, {"actor/entropy": inputs.entropy_BT})
    """

    loss: Tensor
    metrics: Mapping[str, Tensor | Metric] = field(default_factory=dict)
    regularizers: Mapping[str, Regularizer] = field(default_factory=dict)
    unit: LossUnit | None = None  # None: by the shape of `loss`
    coef: float = 1.0


class ReturnReason(StrEnum):
    """Why an update has not learned from a sample that a later update can learn from."""

    NO_CONTRAST = "no_contrast"  # the rewards that its loss compares were all equal
    STOPPED = "stopped"  # max_kl ended the update before a step with it


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
    foreign_turns: Mapping[str, str] = field(default_factory=dict)  # turns that were left out, with the reasons
    returned_turns: Mapping[str, ReturnReason] = field(default_factory=dict)  # turns to learn from in a later update
    unused_texts: Mapping[str, TextRule] = field(default_factory=dict)  # corrections, by id, whose text is not used
