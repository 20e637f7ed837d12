"""The loss that all policy gradients share; what sets them apart is the credit they give.

Ratios are taken to a proximal policy. "recompute" scores the parent anew (decoupled PPO, Hilton et al., 2022): the
clip then bounds the update, and the weight proximal / behaviour, truncated, stands for what the engine or an older
version did differently. "loglinear" interpolates the parent between the recorded log-probs and the policy's own
(AReaL), which saves a forward. "rollout" takes the recorded log-probs as they are: plain PPO.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from alignment.algorithms.base import MicroBatch, RLAlgorithm, TrainData
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
from alignment.trainer.metrics import UpdateReport


class PolicyGradient(RLAlgorithm):
    Config: ClassVar[type[UpdateConfig]] = PolicyGradientConfig

    def __init__(self, config: PolicyGradientConfig) -> None:
        self.config = config
        control = config.kl_control
        self.kl = AdaptiveKLController(config.kl_coef, control.target, control.horizon) if control else None
        # The first step's own log-probs are the parent's: where it is the only one, nothing is scored twice.
        self.needs_parent = config.proximal == "recompute" and config.epochs * config.minibatches > 1
        self.needs_reference = config.kl_coef > 0
        self._mismatch: dict[str, float] = {}

    @property
    def kl_coef(self) -> float:
        return self.kl.value if self.kl else float(self.config.kl_coef)

    def before_train_step(self, step: int, data: TrainData) -> None:
        data.advantages_BT = self.credit(data) * data.mask_BT
        if not data.advantages_BT.any():
            raise NoVariance("every advantage is zero, so no reply is better than those it is compared with")
        data.extra["lag_B"] = torch.tensor([float(sample.lag) for sample in data.samples]).to(data.mask_BT)
        if data.parent_BT is not None:
            correction = self._correct(data.parent_BT, data.rollout_BT, data.mask_BT)
            if not correction.mask_BT.any():
                raise ForeignSamples("the rollout correction rejects every token of the batch")
            self._mismatch = correction.metrics
            if self.config.proximal == "recompute":
                data.extra["weights_BT"] = correction.weights_BT

    def credit(self, data: TrainData) -> Tensor:
        """The advantage of every token, [B, T], or of every reply, [B, 1]."""
        raise NotImplementedError

    def compute_loss(self, data: MicroBatch) -> dict[str, Tensor]:
        config, mask_BT, rollout_BT = self.config, data.mask_BT, data.cut(data.whole.rollout_BT)
        old_BT = self._proximal(data, rollout_BT)
        if "weights_BT" in data.whole.extra:
            weights_BT = data.cut(data.whole.extra["weights_BT"])
        else:
            weights_BT = self._correct(old_BT, rollout_BT, mask_BT).weights_BT
        count = data.num_tokens if config.aggregation == "token-mean" else data.num_sequences

        def aggregated(x_BT: Tensor) -> Tensor:
            return aggregate(x_BT, mask_BT, config.aggregation, denominator=count, horizon=config.horizon)

        def token_mean(x_BT: Tensor) -> Tensor:
            return aggregate(x_BT.detach(), mask_BT, "token-mean", denominator=data.num_tokens)

        pg = policy_loss(
            data.logprobs_BT,
            old_BT,
            data.cut(data.whole.advantages_BT),
            mask_BT,  # what the correction rejected weighs nothing, and stays in the denominator
            kind=config.loss,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            clip_c=config.clip_c,
            rollout_weights_BT=weights_BT,
            aggregation=config.aggregation,
            denominator=count,
            horizon=config.horizon,
        )
        log_ratio_BT = data.logprobs_BT - old_BT
        metrics = {
            "actor/pg_loss": pg.loss.detach(),
            "actor/pg_clipfrac": token_mean(pg.clipped_BT),
            "actor/pg_clipfrac_lower": token_mean(pg.clipped_lower_BT),
            "actor/ppo_kl": token_mean(-log_ratio_BT),
            "actor/ppo_kl_k3": token_mean(kl_estimate(old_BT, data.logprobs_BT, "k3")),
        }
        if not self._mismatch:  # otherwise told of the whole batch, before the first step
            metrics["rollout_corr/kl"] = token_mean(rollout_BT - old_BT)
        loss = pg.loss
        if data.whole.reference_BT is not None:
            reference_BT = data.cut(data.whole.reference_BT)
            metrics["reference_kl"] = token_mean(kl_estimate(data.logprobs_BT, reference_BT, "k3"))
            if self._kl_in_loss():
                kl_loss = aggregated(kl_estimate(data.logprobs_BT, reference_BT, config.kl_kind))
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

    def _correct(self, old_BT: Tensor, rollout_BT: Tensor, mask_BT: Tensor) -> RolloutCorrection:
        settings = self.config.correction
        return rollout_correction(
            old_BT, rollout_BT, mask_BT, level=settings.level, mode=settings.mode, low=settings.low, high=settings.high
        )

    def _proximal(self, data: MicroBatch, rollout_BT: Tensor) -> Tensor:
        if self.config.proximal == "rollout":
            return rollout_BT
        if self.config.proximal == "loglinear":
            return proximal_loglinear(data.logprobs_BT, rollout_BT, data.cut(data.whole.extra["lag_B"]))
        if data.whole.parent_BT is None:
            return data.logprobs_BT.detach()
        return data.cut(data.whole.parent_BT)
