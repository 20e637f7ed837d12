"""The base classes of algorithms: `RLAlgorithm` with its hooks and flags, and the loss that policy gradients share.

In each update, `compute_advantages` returns the advantages of the whole batch, `compute_loss` the losses of the tokens
or replies of a micro-batch, and `after_train_step` reads the report. The trainer sums and averages, so that no
algorithm depends on micro-batches or ranks. The built-in algorithms use only these hooks. To use an algorithm of your
own, name its class in the configuration (`CustomConfig`).

Policy gradients differ in how they compute advantages. Their ratios refer to a proximal policy. "recompute" computes
the log-probs of the policy before the update (decoupled PPO, Hilton et al., 2022): the clip then bounds the update, and
the truncated weight proximal / behaviour corrects for differences of the engine or of an older version. "loglinear"
interpolates between the recorded log-probs and those of the current policy (AReaL), which saves a forward pass.
"rollout" uses the recorded log-probs: plain PPO.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from alignment.config.algorithm import UpdateConfig
from alignment.config.policy_gradient_algorithms import Aggregation, PolicyGradientConfig
from alignment.errors import ForeignSamples, NoVariance
from alignment.functional import (
    AdaptiveKLController,
    RolloutCorrection,
    kl_estimate,
    proximal_loglinear,
    rollout_correction,
)
from alignment.functional.policy_loss_registry import TokenLossInputs, load_policy_loss, weighted_token_loss
from alignment.json_values import as_number
from alignment.types import (
    CriticMicroBatch,
    LossOutput,
    MicroBatch,
    Regularizer,
    Sample,
    TrainData,
    UpdateReport,
    check_variance,
)


class RLAlgorithm:
    """Subclass this, set the flags of what you need, and override the hooks.

    Example: class Mine(RLAlgorithm):
                 needs_reference = False
                 def compute_advantages(self, batch): return batch.rewards_B
                 def compute_loss(self, inputs): return LossOutput(-inputs.advantages_BT * inputs.logprobs_BT)
    """

    Config: ClassVar[type[UpdateConfig]] = UpdateConfig
    needs_old_logprobs: bool = True
    needs_reference: bool = True
    needs_critic: bool = False
    needs_entropy: bool = False
    # True if `compute_loss` returns `actor/ppo_kl_k3`: the trainer then enforces max_kl without scoring the old policy.
    reports_update_kl: bool = False
    # How the trainer aggregates a loss per token (`alignment.functional.aggregate`). The critic's is a token mean.
    aggregation: Aggregation = "token-mean"
    horizon: int | None = None

    def __init__(self, config: Any) -> None:
        self.config = config

    def select(self, samples: Sequence[Sample]) -> list[int]:
        """Return the indices of the samples to learn from: all by default. Raises NoVariance or NothingToCompare."""
        check_variance([sample.reward for sample in samples])
        return list(range(len(samples)))

    def coupled_samples(self, samples: Sequence[Sample]) -> list[tuple[int, ...]]:
        """Return the sets of samples that must share a micro-batch, such as the two replies of a pair.

        A micro-batch has them as `coupled_rows`, in this order.
        """
        return []

    def before_train_step(self, step: int, batch: TrainData) -> None:
        """Run once per update, before the first optimizer step. `step` counts updates from 0."""

    def compute_advantages(self, batch: TrainData) -> Tensor | None:
        """Return the advantage of every token, [B, T], or of every reply, [B] or [B, 1]; None if the loss has none.

        Called once per update, after `before_train_step`.
        """
        return None

    def compute_loss(self, inputs: MicroBatch) -> LossOutput:
        """Return one loss per token or per reply of a micro-batch. Never sum or divide it: the trainer does."""
        raise NotImplementedError

    def compute_value_loss(self, inputs: CriticMicroBatch) -> LossOutput:
        """Return the same for the critic. Called only if `needs_critic` is set."""
        raise NotImplementedError

    def after_train_step(self, step: int, report: UpdateReport) -> None:
        """Run once per update, after its last optimizer step."""

    def get_metrics(self) -> dict[str, float]:
        """Return the algorithm's own metrics of the last update."""
        return {}

    def state_dict(self) -> dict[str, object]:
        """Return the state as JSON values. It is stored with every version and restored by a rollback."""
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Restore a state from `state_dict`. An empty state means that no update was made yet."""


def prepare_step(algorithm: RLAlgorithm, step: int, batch: TrainData) -> None:
    """Run the hooks that come before the first optimizer step, and put the advantages into the batch.

    Raises NoVariance if every advantage is 0, and ValueError if they do not fit the batch.
    """
    algorithm.before_train_step(step, batch)
    advantages = algorithm.compute_advantages(batch)
    if advantages is None:
        return
    num_samples, num_tokens = batch.response_mask_BT.shape
    if advantages.shape not in ((num_samples, num_tokens), (num_samples, 1), (num_samples,)):
        raise ValueError(
            f"compute_advantages returned {list(advantages.shape)}: one value per token is "
            f"{[num_samples, num_tokens]}, one per reply {[num_samples]} or {[num_samples, 1]}"
        )
    batch.advantages_BT = (advantages[:, None] if advantages.dim() == 1 else advantages) * batch.response_mask_BT
    if not batch.advantages_BT.any():
        raise NoVariance("every advantage is zero, so no reply is better than another")


class PolicyGradient(RLAlgorithm):
    Config = PolicyGradientConfig
    reports_update_kl = True

    def __init__(self, config: PolicyGradientConfig) -> None:
        self.config = config
        control = config.kl_control
        self.kl = AdaptiveKLController(config.kl_coef, control.target, control.horizon) if control else None
        # The log-probs of the first step equal the old ones: with a single step no extra forward pass is needed.
        self.needs_old_logprobs = config.proximal == "recompute" and config.epochs * config.minibatches > 1
        self.aggregation, self.horizon = config.aggregation, config.horizon
        loss = load_policy_loss(config.loss)
        self.policy_loss = loss.bind(dict(config), config.loss_params)
        self.needs_reference = config.kl_coef > 0 or loss.needs_reference
        self.needs_entropy = config.entropy_coef > 0 or loss.needs_entropy
        self._mismatch: dict[str, float] = {}

    @property
    def kl_coef(self) -> float:
        return self.kl.value if self.kl else float(self.config.kl_coef)

    def before_train_step(self, step: int, batch: TrainData) -> None:
        mask_BT = batch.response_mask_BT
        batch.extra["lag_B"] = torch.tensor([float(sample.lag) for sample in batch.samples]).to(mask_BT)
        if batch.old_logprobs_BT is not None:
            correction = self._correct(batch.old_logprobs_BT, batch.rollout_logprobs_BT, mask_BT)
            if not correction.mask_BT.any():
                raise ForeignSamples("the rollout correction rejects every token of the batch")
            self._mismatch = correction.metrics
            if self.config.proximal == "recompute":
                batch.extra["weights_BT"] = correction.weights_BT

    def compute_advantages(self, batch: TrainData) -> Tensor:
        """Return the advantage of every token, [B, T], or of every reply, [B] or [B, 1]."""
        raise NotImplementedError

    def compute_loss(self, inputs: MicroBatch) -> LossOutput:
        config, batch, rollout_logprobs_BT = self.config, inputs.batch, inputs.rollout_logprobs_BT
        proximal_BT = self._proximal(inputs, rollout_logprobs_BT)
        if "weights_BT" in batch.extra:
            weights_BT = inputs.rows(batch.extra["weights_BT"])
        else:
            weights_BT = self._correct(proximal_BT, rollout_logprobs_BT, inputs.response_mask_BT).weights_BT
        ref_logprobs_BT = inputs.ref_logprobs_BT if batch.ref_logprobs_BT is not None else None
        entropy_BT = inputs.entropy_BT if self.needs_entropy else None
        result = weighted_token_loss(  # rejected tokens have weight 0 and stay in the denominator
            self.policy_loss,
            TokenLossInputs(
                inputs.logprobs_BT,
                proximal_BT,
                rollout_logprobs_BT,
                inputs.advantages_BT,
                inputs.response_mask_BT,
                ref_logprobs_BT,
                entropy_BT,
            ),
            weights_BT,
        )
        metrics = {
            **result.metrics,
            "actor/ppo_kl": proximal_BT - inputs.logprobs_BT,
            "actor/ppo_kl_k3": kl_estimate(proximal_BT, inputs.logprobs_BT, "k3"),
        }
        if not self._mismatch:  # otherwise reported for the whole batch, before the first step
            metrics["rollout_corr/kl"] = rollout_logprobs_BT - proximal_BT
        regularizers: dict[str, Regularizer] = {}
        if ref_logprobs_BT is not None:
            metrics["reference_kl"] = kl_estimate(inputs.logprobs_BT, ref_logprobs_BT, "k3")
            if self._kl_in_loss():
                kl_BT = kl_estimate(inputs.logprobs_BT, ref_logprobs_BT, config.kl_kind)
                regularizers["actor/kl_loss"] = Regularizer(self.kl_coef, kl_BT)
        if entropy_BT is not None:
            metrics["actor/entropy"] = entropy_BT
            if config.entropy_coef:
                regularizers["actor/entropy_loss"] = Regularizer(config.entropy_coef, -entropy_BT)
        return LossOutput(result.loss_BT, metrics, regularizers)

    def after_train_step(self, step: int, report: UpdateReport) -> None:
        if self.kl and "reference_kl" in report.metrics:
            self.kl.update(report.metrics["reference_kl"], int(report.metrics["training/samples"]))

    def get_metrics(self) -> dict[str, float]:
        return {"actor/kl_coef": self.kl_coef} | self._mismatch

    def state_dict(self) -> dict[str, object]:
        return {"kl_coef": self.kl.value} if self.kl else {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        if self.kl:
            self.kl.value = as_number(state.get("kl_coef", self.config.kl_coef))

    def _kl_in_loss(self) -> bool:
        return self.kl_coef > 0

    def _correct(self, proximal_BT: Tensor, rollout_logprobs_BT: Tensor, mask_BT: Tensor) -> RolloutCorrection:
        settings = self.config.correction.model_dump()
        return rollout_correction(proximal_BT, rollout_logprobs_BT, mask_BT, **settings)

    def _proximal(self, inputs: MicroBatch, rollout_logprobs_BT: Tensor) -> Tensor:
        if self.config.proximal == "rollout":
            return rollout_logprobs_BT
        if self.config.proximal == "loglinear":
            lag_B = inputs.rows(inputs.batch.extra["lag_B"])
            return proximal_loglinear(inputs.logprobs_BT, rollout_logprobs_BT, lag_B)
        return inputs.logprobs_BT.detach() if inputs.batch.old_logprobs_BT is None else inputs.old_logprobs_BT
