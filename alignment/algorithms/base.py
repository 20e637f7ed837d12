"""The base class of all algorithms: four hooks, and flags for the inputs that an algorithm needs.

In each update, `before_train_step` computes advantages for the whole batch, `compute_loss` returns the loss of a
micro-batch, and `after_train_step` reads the report. The built-in algorithms use only these hooks. To use an algorithm
of your own, name its class in the configuration (`CustomConfig`).
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from alignment.config.algorithm import UpdateConfig
from alignment.types import MicroBatch, Sample, TrainData, UpdateReport, check_variance


class RLAlgorithm:
    """Subclass this, set the flags of what you need, and override the hooks.

    Example: class Mine(RLAlgorithm):
                 needs_reference = False
                 def before_train_step(self, step, data): data.advantages_BT = data.rewards_B[:, None] * data.mask_BT
                 def compute_loss(self, data): ...; return {"loss": loss}
    """

    Config: ClassVar[type[UpdateConfig]] = UpdateConfig
    needs_old_logprobs: bool = True
    needs_reference: bool = True
    needs_critic: bool = False
    # True if `compute_loss` returns `actor/ppo_kl_k3`: the trainer then enforces max_kl without scoring the old policy.
    reports_update_kl: bool = False

    def __init__(self, config: Any) -> None:
        self.config = config

    def select(self, samples: Sequence[Sample]) -> list[int]:
        """Return the indices of the samples to learn from: all by default. Raises NoVariance or NothingToCompare."""
        check_variance([sample.reward for sample in samples])
        return list(range(len(samples)))

    def coupled_samples(self, samples: Sequence[Sample]) -> list[tuple[int, ...]]:
        """Return the sets of samples that must share a micro-batch, such as the two replies of a pair."""
        return []

    def before_train_step(self, step: int, data: TrainData) -> None:
        """Run once per update, before the first optimizer step: compute advantages. `step` counts updates from 0."""

    def compute_loss(self, data: MicroBatch) -> dict[str, Tensor]:
        """Return `loss` and metrics by name. All values must add up over the micro-batches of a minibatch.

        The names must be the same for every micro-batch, because they are summed over the ranks.
        """
        raise NotImplementedError

    def compute_value_loss(self, data: MicroBatch) -> dict[str, Tensor]:
        """Return the same for the critic. Called only if `needs_critic` is set."""
        raise NotImplementedError

    def after_train_step(self, step: int, report: UpdateReport) -> None:
        """Run once per update, after its last optimizer step."""

    def get_metrics(self) -> dict[str, float]:
        """Return the algorithm's own metrics of the last update."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values. It is stored with every version and restored by a rollback."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from `state_dict`. An empty state means that no update was made yet."""
