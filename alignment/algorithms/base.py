"""The base classes of algorithms: `RLAlgorithm` with its hooks and flags, and the loss that policy gradients share.

In each update, `before_train_step` computes advantages for the whole batch, `compute_loss` returns the loss of a
micro-batch, and `after_train_step` reads the report. The built-in algorithms use only these hooks. To use an algorithm
of your own, name its class in the configuration (`CustomConfig`).

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

from alignment.config.algorithm import PolicyGradientConfig, UpdateConfig
from alignment.errors import ForeignSamples, NoVariance
from alignment.functional import (
    AdaptiveKLController,
    RolloutCorrection,
    aggregate,
    kl_estimate,
    policy_loss,
    proximal_loglinear,
    rollout_correction,
)
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
    # True if the loss needs samples of about the current policy. Late samples are then learned from by KTO.
    is_on_policy: bool = False
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


class PolicyGradient(RLAlgorithm):
    Config = PolicyGradientConfig
    is_on_policy = True
    reports_update_kl = True

    def __init__(self, config: PolicyGradientConfig) -> None:
        self.config = config
        control = config.kl_control
        self.kl = AdaptiveKLController(config.kl_coef, control.target, control.horizon) if control else None
        # The log-probs of the first step equal the old ones: with a single step no extra forward pass is needed.
        self.needs_old_logprobs = config.proximal == "recompute" and config.epochs * config.minibatches > 1
        self.needs_reference = config.kl_coef > 0
        self._mismatch: dict[str, float] = {}

    @property
    def kl_coef(self) -> float:
        return self.kl.value if self.kl else float(self.config.kl_coef)

    def before_train_step(self, step: int, data: TrainData) -> None:
        data.advantages_BT = self.compute_advantages(data) * data.mask_BT
        if not data.advantages_BT.any():
            raise NoVariance("every advantage is zero, so no reply is better than another")
        data.extra["lag_B"] = torch.tensor([float(sample.lag) for sample in data.samples]).to(data.mask_BT)
        if data.old_logprobs_BT is not None:
            correction = self._correct(data.old_logprobs_BT, data.rollout_logprobs_BT, data.mask_BT)
            if not correction.mask_BT.any():
                raise ForeignSamples("the rollout correction rejects every token of the batch")
            self._mismatch = correction.metrics
            if self.config.proximal == "recompute":
                data.extra["weights_BT"] = correction.weights_BT

    def compute_advantages(self, data: TrainData) -> Tensor:
        """Return the advantage of every token, [B, T], or of every reply, [B, 1]."""
        raise NotImplementedError

    def compute_loss(self, data: MicroBatch) -> dict[str, Tensor]:
        config, mask_BT, rollout_logprobs_BT = self.config, data.mask_BT, data.rows(data.batch.rollout_logprobs_BT)
        proximal_BT = self._proximal(data, rollout_logprobs_BT)
        if "weights_BT" in data.batch.extra:
            weights_BT = data.rows(data.batch.extra["weights_BT"])
        else:
            weights_BT = self._correct(proximal_BT, rollout_logprobs_BT, mask_BT).weights_BT
        count = data.num_tokens if config.aggregation == "token-mean" else data.num_sequences

        def aggregated(x_BT: Tensor) -> Tensor:
            return aggregate(x_BT, mask_BT, config.aggregation, denominator=count, horizon=config.horizon)

        def token_mean(x_BT: Tensor) -> Tensor:
            return aggregate(x_BT.detach(), mask_BT, "token-mean", denominator=data.num_tokens)

        pg = policy_loss(
            data.logprobs_BT,
            proximal_BT,
            data.rows(data.batch.advantages_BT),
            mask_BT,  # rejected tokens have weight 0 and stay in the denominator
            kind=config.loss,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            clip_c=config.clip_c,
            tau_pos=config.tau_pos,
            tau_neg=config.tau_neg,
            rollout_weights_BT=weights_BT,
            aggregation=config.aggregation,
            denominator=count,
            horizon=config.horizon,
        )
        log_ratio_BT = data.logprobs_BT - proximal_BT
        metrics = {
            "actor/pg_loss": pg.loss.detach(),
            "actor/pg_clipfrac": token_mean(pg.clipped_BT),
            "actor/pg_clipfrac_lower": token_mean(pg.clipped_lower_BT),
            "actor/ppo_kl": token_mean(-log_ratio_BT),
            "actor/ppo_kl_k3": token_mean(kl_estimate(proximal_BT, data.logprobs_BT, "k3")),
        }
        if not self._mismatch:  # otherwise reported for the whole batch, before the first step
            metrics["rollout_corr/kl"] = token_mean(rollout_logprobs_BT - proximal_BT)
        loss = pg.loss
        if data.batch.ref_logprobs_BT is not None:
            ref_logprobs_BT = data.rows(data.batch.ref_logprobs_BT)
            metrics["reference_kl"] = token_mean(kl_estimate(data.logprobs_BT, ref_logprobs_BT, "k3"))
            if self._kl_in_loss():
                kl_loss = aggregated(kl_estimate(data.logprobs_BT, ref_logprobs_BT, config.kl_kind))
                metrics["actor/kl_loss"] = kl_loss.detach()
                loss = loss + self.kl_coef * kl_loss
        return {"loss": loss} | metrics

    def after_train_step(self, step: int, report: UpdateReport) -> None:
        if self.kl and "reference_kl" in report.metrics:
            self.kl.update(report.metrics["reference_kl"], int(report.metrics["training/samples"]))

    def get_metrics(self) -> dict[str, float]:
        return {"actor/kl_coef": self.kl_coef} | self._mismatch

    def state_dict(self) -> dict[str, Any]:
        return {"kl_coef": self.kl.value} if self.kl else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.kl:
            self.kl.value = float(state.get("kl_coef", self.config.kl_coef))

    def _kl_in_loss(self) -> bool:
        return self.kl_coef > 0

    def _correct(self, proximal_BT: Tensor, rollout_logprobs_BT: Tensor, mask_BT: Tensor) -> RolloutCorrection:
        settings = self.config.correction.model_dump()
        return rollout_correction(proximal_BT, rollout_logprobs_BT, mask_BT, **settings)

    def _proximal(self, data: MicroBatch, rollout_logprobs_BT: Tensor) -> Tensor:
        if self.config.proximal == "rollout":
            return rollout_logprobs_BT
        if self.config.proximal == "loglinear":
            return proximal_loglinear(data.logprobs_BT, rollout_logprobs_BT, data.rows(data.batch.extra["lag_B"]))
        if data.batch.old_logprobs_BT is None:
            return data.logprobs_BT.detach()
        return data.rows(data.batch.old_logprobs_BT)
