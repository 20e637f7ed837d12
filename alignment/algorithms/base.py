"""What an algorithm is: credit for a whole batch, then a loss for any part of it."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from alignment.functional import RolloutCorrection


@dataclass(frozen=True)
class LossInputs:
    """Part of a minibatch. All tensors but `logprobs_BT` are constants."""

    logprobs_BT: Tensor  # under the policy being updated: carries the gradient
    parent_BT: Tensor  # under the version the update began from
    reference_BT: Tensor  # under the base model
    weights_BT: Tensor  # of the rollout correction
    advantages_BT: Tensor
    mask_BT: Tensor
    num_tokens: int  # in the whole minibatch, over all micro-batches and ranks
    num_sequences: int


@dataclass(frozen=True)
class LossOutputs:
    """A loss to go backward from, and metrics; both add up over the parts of a minibatch."""

    loss: Tensor
    metrics: dict[str, Tensor]


class Algorithm(Protocol):
    """Credit says who deserves what, once per update; the loss acts on it, once per step."""

    def credit(self, rewards_B: Tensor, mask_BT: Tensor, baseline: float) -> tuple[Tensor, float]:
        """The advantage of every token, and the baseline to remember."""
        ...

    def correct(self, parent_BT: Tensor, rollout_BT: Tensor, mask_BT: Tensor) -> RolloutCorrection:
        """How much each token counts, given that the engine and not the parent drew it."""
        ...

    def loss(self, inputs: LossInputs) -> LossOutputs: ...
