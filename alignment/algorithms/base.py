"""What an algorithm is: four hooks, and a few facts about what it wants to know.

An update is one train step: `before_train_step` gives credit for the whole batch, `compute_loss` makes a loss from
any part of it, `after_train_step` looks at what came out. The built-in algorithms are written on nothing else, and
one of your own needs nothing else: name its class in the configuration (`CustomConfig`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from alignment.config.algorithm import UpdateConfig
from alignment.trainer.metrics import UpdateReport
from alignment.types import Sample, check_variance


@dataclass
class TrainData:
    """A whole batch: B samples of up to T output tokens, the same on every rank. None is what was not asked for."""

    samples: Sequence[Sample]
    mask_BT: Tensor  # 1 where there is an output token, 0 in the padding
    rewards_B: Tensor
    rollout_BT: Tensor  # log-probs as the engine recorded them
    parent_BT: Tensor | None = None  # as the policy gives them before the update
    reference_BT: Tensor | None = None  # as the base model does
    values_BT: Tensor | None = None  # of the critic, before each token
    advantages_BT: Tensor | None = None  # from here on: for `before_train_step` to fill
    returns_BT: Tensor | None = None
    extra: dict[str, Tensor] = field(default_factory=dict)  # yours, first dimension B; cut with the rest

    @cached_property
    def group_B(self) -> Tensor:
        """A number for each sample's group; a sample without one is alone."""
        numbers: dict[str, int] = {}
        names = [sample.group or f"alone {index}" for index, sample in enumerate(self.samples)]
        return torch.tensor([numbers.setdefault(name, len(numbers)) for name in names], device=self.mask_BT.device)

    @cached_property
    def length_B(self) -> Tensor:
        return self.mask_BT.sum(-1)


@dataclass(frozen=True)
class MicroBatch:
    """Part of a minibatch: the rows of `whole` that one forward scored.

    Sums over a minibatch are to be divided by `num_tokens` or `num_sequences`, which count the whole of it over all
    micro-batches and ranks: then losses and metrics of the parts add up, however it is cut.
    """

    whole: TrainData
    rows: tuple[int, ...]
    scored_BT: Tensor  # carries the gradient
    num_tokens: int
    num_sequences: int
    minibatch: tuple[int, ...]  # the rows of all its parts

    @property
    def logprobs_BT(self) -> Tensor:
        """Of the policy as it stands, in `compute_loss`."""
        return self.scored_BT

    @property
    def values_BT(self) -> Tensor:
        """Of the critic as it stands, in `compute_value_loss`."""
        return self.scored_BT

    @property
    def mask_BT(self) -> Tensor:
        return self.cut(self.whole.mask_BT)

    def cut(self, tensor_B: Tensor | None) -> Tensor:
        """These rows of a tensor of the whole batch."""
        assert tensor_B is not None, "the algorithm did not ask for this"
        return tensor_B[list(self.rows)]


class RLAlgorithm:
    """Subclass it, say what you need, and override the hooks.

    Example: class Mine(RLAlgorithm):
                 needs_reference = False
                 def before_train_step(self, step, data): data.advantages_BT = data.rewards_B[:, None] * data.mask_BT
                 def compute_loss(self, data): ...; return {"loss": loss}
    """

    Config: ClassVar[type[UpdateConfig]] = UpdateConfig
    needs_parent: bool = True
    needs_reference: bool = True
    needs_critic: bool = False

    def __init__(self, config: Any) -> None:
        self.config = config

    def select(self, samples: Sequence[Sample]) -> list[int]:
        """Which samples to learn from, all unless overridden. Raises NoVariance or NothingToCompare."""
        check_variance([sample.reward for sample in samples])
        return list(range(len(samples)))

    def together(self, samples: Sequence[Sample]) -> list[tuple[int, ...]]:
        """Samples that one micro-batch must hold, such as the two of a pair."""
        return []

    def before_train_step(self, step: int, data: TrainData) -> None:
        """Once an update, before anything is learned: say who deserves what. `step` counts updates from 0."""

    def compute_loss(self, data: MicroBatch) -> dict[str, Tensor]:
        """`loss`, to go backward from, and metrics under their names; all add up over the parts of a minibatch.

        The names are the same for every part: they are summed over the ranks.
        """
        raise NotImplementedError

    def compute_value_loss(self, data: MicroBatch) -> dict[str, Tensor]:
        """The same for the critic, where there is one."""
        raise NotImplementedError

    def after_train_step(self, step: int, report: UpdateReport) -> None:
        """Once an update, when it has been made."""

    def get_metrics(self) -> dict[str, float]:
        """What the algorithm itself has to tell after an update."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What must outlive the process, as JSON: it is kept with every version, and goes back with a rollback."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it up again; an empty state is a policy that has learned nothing."""
