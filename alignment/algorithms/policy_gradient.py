"""The loss that all policy gradient algorithms share. They differ in how they compute advantages.

Ratios refer to a proximal policy. "recompute" computes the log-probs of the policy before the update (decoupled PPO,
Hilton et al., 2022): the clip then bounds the update, and the truncated weight proximal / behaviour corrects for
differences of the engine or of an older version. "loglinear" interpolates between the recorded log-probs and those of
the current policy (AReaL), which saves a forward pass. "rollout" uses the recorded log-probs: plain PPO.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from alignment.algorithms.base import RLAlgorithm
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
from alignment.types import MicroBatch, TrainData, UpdateReport


class PolicyGradient(RLAlgorithm):
    Config: ClassVar[type[UpdateConfig]] = PolicyGradientConfig
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
        settings = self.config.correction
        return rollout_correction(
            proximal_BT,
            rollout_logprobs_BT,
            mask_BT,
            level=settings.level,
            mode=settings.mode,
            low=settings.low,
            high=settings.high,
        )

    def _proximal(self, data: MicroBatch, rollout_logprobs_BT: Tensor) -> Tensor:
        if self.config.proximal == "rollout":
            return rollout_logprobs_BT
        if self.config.proximal == "loglinear":
            return proximal_loglinear(data.logprobs_BT, rollout_logprobs_BT, data.rows(data.batch.extra["lag_B"]))
        if data.batch.old_logprobs_BT is None:
            return data.logprobs_BT.detach()
        return data.rows(data.batch.old_logprobs_BT)
