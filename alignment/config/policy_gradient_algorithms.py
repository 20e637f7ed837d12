"""Settings of the policy gradients: of PPO, of the algorithms that compare the replies of a group, and of REINFORCE++.

The defaults are tested recipes. Torch-free.
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from alignment.config.algorithm import CorrectionConfig, UpdateConfig
from alignment.config.frozen_model import Frozen

KLKind = Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"]
Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]
PolicyLossKind = Literal["ppo", "gspo", "cispo", "sapo", "reinforce", "dppo_tv"]

POLICY_LOSS_ENTRY_POINTS = "attune.policy_losses"

# Defaults that the papers of these losses need: Zheng et al., 2025 (GSPO: the ratio of a sequence is near 1) and Gao et
# al., 2025 (SAPO). Both average over the tokens of a reply, then over replies.
LOSS_DEFAULTS: dict[str, dict[str, object]] = {
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "seq-mean-token-mean"},
    "sapo": {"aggregation": "seq-mean-token-mean"},
}


class AdaptiveKLConfig(Frozen):
    """Adapts kl_coef so that the KL to the base model approaches `target`. Keep it below the limit of the KL guard."""

    target: float = Field(default=0.01, gt=0)
    horizon: int = Field(default=10_000, ge=1, description="samples")


class PolicyGradientConfig(UpdateConfig):
    """Settings of all policy gradients: the loss, the correction for stale samples, and the KL to the base model.

    With gspo the defaults of the clips are 3e-4 and 4e-4; with gspo and sapo that of `aggregation` is
    seq-mean-token-mean.
    """

    loss: str = Field(
        default="ppo",
        min_length=1,
        description="a built-in policy loss, an entry point of the group `attune.policy_losses`, or `module:function`",
    )
    loss_params: dict[str, object] = Field(default={}, description="parameters of a loss of another package")
    clip_low: float = Field(default=0.2, gt=0, description="ratios are clipped to 1 - clip_low …")
    clip_high: float = Field(default=0.2, gt=0, description="… and 1 + clip_high")
    clip_c: float | None = Field(
        default=3.0, gt=1, description="bound of the ratio: of ppo where the advantage is negative, of dppo_tv always"
    )
    tau_pos: float = Field(default=1.0, gt=0, description="of sapo, where the advantage is positive")
    tau_neg: float = Field(default=1.05, gt=0, description="of sapo, elsewhere")
    aggregation: Aggregation = Field(
        default="token-mean", description="how losses per token become one: over all tokens, or within each reply first"
    )
    horizon: int = Field(default=512, ge=1, description="tokens, for seq-mean-token-sum-norm")
    kl_coef: float = Field(default=0.01, ge=0, description="weight of the KL to the base model")
    kl_kind: KLKind = Field(
        default="k3", description="estimator of the KL to the base model; with +, its gradient is that of k2"
    )
    kl_control: AdaptiveKLConfig | None = Field(
        default=None, description="adapts `kl_coef` to reach a KL, e.g. {target = 0.01}; constant when unset"
    )
    entropy_coef: float = Field(
        default=0.0, ge=0, description="weight of the entropy bonus; the entropy is computed where it is not 0"
    )
    correction: CorrectionConfig = Field(
        default=CorrectionConfig(),
        description="weights of tokens that another version or engine computed: `level` token or sequence; `mode` off, "
        "truncate, mask, clamp or reject outside `low` to `high`",
    )
    proximal: Literal["recompute", "loglinear", "rollout"] = Field(
        default="recompute",
        description="the policy that ratios refer to: recomputed before the update, interpolated, or as recorded",
    )

    @model_validator(mode="before")
    @classmethod
    def _apply_loss_defaults(cls, data: object) -> object:
        return LOSS_DEFAULTS.get(str(data.get("loss")), {}) | data if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _check_loss_params(self) -> Self:
        if misplaced := sorted(self.loss_params.keys() & type(self).model_fields.keys()):
            raise ValueError(f"{', '.join(misplaced)} must stand beside loss_params, not in them")
        return self

    @model_validator(mode="after")
    def _check_kl_control(self) -> Self:
        if self.kl_control and not self.kl_coef:
            raise ValueError("kl_control multiplies kl_coef, so kl_coef must not be 0")
        return self


class PPOConfig(PolicyGradientConfig):
    """PPO for one reply per prompt.

    `estimator="running_baseline"` compares a reward with the mean of earlier rewards, "gae" with a critic's values
    at each token, "turn_gae" with those at the first token of each turn of an episode.
    `whiten="scale"` divides by the batch's root mean square and leaves the centring to the baseline; "full" subtracts
    the batch's mean, and with it any common shift, and divides by the standard deviation.
    """

    type: Literal["ppo"] = "ppo"
    estimator: Literal["running_baseline", "gae", "turn_gae"] = Field(
        default="running_baseline",
        description="what a reward is compared with: earlier rewards, or a critic's values by token (gae) or by turn "
        "of an episode (turn_gae)",
    )
    baseline_decay: float = Field(
        default=0.7, ge=0, lt=1, description="weight of a version's rewards in the baseline, relative to the next one's"
    )
    baseline_per_version: bool = Field(
        default=True,
        description="whether each version has a baseline of its own, as late votes need; false: one mean for all",
    )
    baseline_per_agent: bool = Field(
        default=False, description="whether the turns of each agent of an episode have a baseline of their own, by name"
    )
    whiten: Literal["scale", "full", "off"] = Field(
        default="scale", description="advantages are divided by their root mean square (scale), or also centred (full)"
    )
    gamma: float = Field(default=1.0, gt=0, le=1, description="discount per token with gae, per turn with turn_gae")
    lam: float = Field(
        default=1.0, ge=0, le=1, description="λ of both: 1 uses whole returns, 0 the critic's next value"
    )
    turn_discount: float = Field(
        default=0.0, ge=0, le=1, description="discount per turn for the rewards of later turns"
    )
    kl_in: Literal["loss", "reward"] = Field(
        default="loss", description="whether the KL to the base model is a part of the loss, or of each token's reward"
    )
    value_clip: float | None = Field(
        default=0.5, gt=0, description="how far the critic's value may move in an update, with a critic; null for any"
    )
    value_coef: float = Field(default=1.0, gt=0, description="weight of the critic's loss")

    @property
    def has_critic(self) -> bool:
        return self.estimator != "running_baseline"


class LengthAwarePPOConfig(PPOConfig):
    """PPO with a penalty on replies that are not between `shortest` and `longest` tokens long."""

    type: Literal["length_aware_ppo"] = "length_aware_ppo"  # type: ignore[assignment]
    shortest: int = Field(default=30, ge=0, description="tokens; that of observability.length_range when unset")
    longest: int = Field(default=80, ge=1, description="tokens; that of observability.length_range when unset")
    length_share: float = Field(
        default=0.1, ge=0, le=1, description="the largest penalty, as a share of the batch's mean |reward|"
    )
    drift_patience: int = Field(
        default=3, ge=1, description="consecutive batches out of range before the range is tightened"
    )
    drift_step: int = Field(default=2, ge=0, description="tokens")

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        if self.shortest >= self.longest:
            raise ValueError(f"shortest ({self.shortest}) must be below longest ({self.longest})")
        return self


class GroupRelativeConfig(PolicyGradientConfig):
    """Settings of the policy gradients that compare a reply with the others of its group."""

    baseline_per_agent: bool = Field(
        default=False,
        description="whether the turns of an agent are compared with those of the agent of the same name, in groups of "
        "episodes",
    )

    @property
    def needs_groups(self) -> bool:
        return True

    @property
    def compares_episodes(self) -> bool:
        return True


class GRPOConfig(GroupRelativeConfig):
    """Shao et al., 2024: the reward relative to its group, divided by the group's standard deviation."""

    type: Literal["grpo"] = "grpo"
    aggregation: Aggregation = "seq-mean-token-mean"
    eps: float = Field(default=1e-6, gt=0, description="added to the standard deviation of a group")


class DrGRPOConfig(GroupRelativeConfig):
    """Liu et al., 2025: no division by the standard deviation, and no length in the denominator."""

    type: Literal["dr_grpo"] = "dr_grpo"
    aggregation: Aggregation = "seq-mean-token-sum-norm"
    kl_coef: float = Field(default=0.0, ge=0)


class DAPOConfig(GroupRelativeConfig):
    """Yu et al., 2025: clip-higher, token mean, no KL, groups without variance skipped, soft overlong penalty."""

    type: Literal["dapo"] = "dapo"
    clip_high: float = Field(default=0.28, gt=0)
    kl_coef: float = Field(default=0.0, ge=0)
    eps: float = Field(default=1e-6, gt=0, description="added to the standard deviation of a group")
    overlong_longest: int | None = Field(default=None, ge=1, description="tokens; no penalty when unset")
    overlong_buffer: int = Field(
        default=64, ge=1, description="tokens before `overlong_longest` where the penalty begins"
    )


class GiGPOConfig(GroupRelativeConfig):
    """Feng et al., 2025: GRPO on episodes, plus the return of a turn relative to other turns in the same state."""

    type: Literal["gigpo"] = "gigpo"
    aggregation: Aggregation = "seq-mean-token-mean"
    step_weight: float = Field(default=1.0, ge=0, description="weight of the comparison of turns in the same state")
    scale_by_std: bool = Field(
        default=True, description="whether both comparisons are divided by their standard deviation"
    )
    eps: float = Field(default=1e-6, gt=0, description="added to the standard deviations")


class RLOOConfig(GroupRelativeConfig):
    """Ahmadian et al., 2024: the reward minus the mean of the others in its group."""

    type: Literal["rloo"] = "rloo"


class ReinforcePlusPlusConfig(PolicyGradientConfig):
    """Hu et al., 2025: rewards whitened over the whole batch; `baseline="group"` first subtracts the group's mean."""

    type: Literal["reinforce++"] = "reinforce++"
    baseline: Literal["batch", "group"] = Field(
        default="batch", description="what is subtracted from a reward first: nothing (batch), or its group's mean"
    )
    gamma: float = Field(default=1.0, gt=0, le=1, description="discount per token")

    @property
    def needs_groups(self) -> bool:
        return self.baseline == "group"

    @property
    def compares_episodes(self) -> bool:
        return self.baseline == "group"

    @model_validator(mode="after")
    def _check_gamma(self) -> Self:
        if self.baseline == "group" and self.gamma != 1:
            raise ValueError("baseline=group compares whole replies without a discount, so gamma must be 1")
        return self
