"""Settings of every algorithm, discriminated by `type`. The defaults are tested recipes. Torch-free."""

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

KLKind = Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"]
Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]
PolicyLossKind = Literal["ppo", "gspo", "cispo", "sapo", "reinforce", "dppo_tv"]
CorrectionLevel = Literal["token", "sequence"]
CorrectionMode = Literal["off", "truncate", "mask", "clamp", "reject"]
PairKind = Literal["sigmoid", "ipo", "hinge", "robust", "apo_zero", "apo_down"]
UnpairedKind = Literal["kto", "apo_zero_unpaired"]


class Frozen(BaseModel):
    """Base class of settings: immutable, and unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class CorrectionConfig(Frozen):
    """Correction for samples of another version or another engine. Weights are proximal / behaviour."""

    level: CorrectionLevel = "token"
    mode: CorrectionMode = "truncate"
    low: float = Field(default=0.0, ge=0)
    high: float = Field(default=2.0, gt=0)

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low ({self.low}) must be below high ({self.high})")
        return self


class AdaptiveKLConfig(Frozen):
    """Adapts kl_coef so that the KL to the base model approaches `target`. Keep it below the limit of the KL guard."""

    target: float = Field(default=0.01, gt=0)
    horizon: int = Field(default=10_000, ge=1, description="samples")


class UpdateConfig(Frozen):
    """One update: `epochs` passes over the batch, each of `minibatches` optimizer steps."""

    epochs: int = Field(default=1, ge=1)
    minibatches: int = Field(default=4, ge=1)
    max_kl: float | None = Field(
        default=0.1, gt=0, description="an update stops at this KL per token (k3) to the policy before it"
    )

    @property
    def needs_groups(self) -> bool:
        """Whether the algorithm learns from groups alone: from two or more replies to one prompt."""
        return False


class PolicyGradientConfig(UpdateConfig):
    """Settings of all policy gradients: the loss, the correction for stale samples, and the KL to the base model."""

    loss: PolicyLossKind = "ppo"
    clip_low: float = Field(default=0.2, gt=0)
    clip_high: float = Field(default=0.2, gt=0)
    clip_c: float | None = Field(
        default=3.0, gt=1, description="bound of the ratio: of ppo where the advantage is negative, of dppo_tv always"
    )
    tau_pos: float = Field(default=1.0, gt=0, description="of sapo, where the advantage is positive")
    tau_neg: float = Field(default=1.05, gt=0, description="of sapo, elsewhere")
    aggregation: Aggregation = "token-mean"
    horizon: int = Field(default=512, ge=1, description="tokens, for seq-mean-token-sum-norm")
    kl_coef: float = Field(default=0.01, ge=0)
    kl_kind: KLKind = "k3"
    kl_control: AdaptiveKLConfig | None = None
    correction: CorrectionConfig = CorrectionConfig()
    proximal: Literal["recompute", "loglinear", "rollout"] = Field(
        default="recompute",
        description="the policy that ratios refer to: recomputed before the update, interpolated, or as recorded",
    )

    @model_validator(mode="after")
    def _check_kl_control(self) -> Self:
        if self.kl_control and not self.kl_coef:
            raise ValueError("kl_control multiplies kl_coef, so kl_coef must not be 0")
        return self


class PPOConfig(PolicyGradientConfig):
    """PPO for one reply per prompt.

    `estimator="running_baseline"` compares a reward with the mean of earlier batches, "gae" with a critic's values.
    `whiten="scale"` divides by the batch's standard deviation and leaves the centring to the baseline; "full" also
    subtracts the batch's mean, and with it any common shift.
    """

    type: Literal["ppo"] = "ppo"
    estimator: Literal["running_baseline", "gae"] = "running_baseline"
    baseline_decay: float = Field(default=0.7, ge=0, lt=1)
    whiten: Literal["scale", "full", "off"] = "scale"
    gamma: float = Field(default=1.0, gt=0, le=1)
    lam: float = Field(default=1.0, ge=0, le=1)
    turn_discount: float = Field(
        default=0.0, ge=0, le=1, description="discount per turn for the rewards of later turns"
    )
    kl_in: Literal["loss", "reward"] = "loss"
    value_clip: float | None = Field(default=0.5, gt=0)
    value_coef: float = Field(default=1.0, gt=0)


class LengthAwarePPOConfig(PPOConfig):
    """PPO with a penalty on replies that are not between `shortest` and `longest` tokens long."""

    type: Literal["length_aware_ppo"] = "length_aware_ppo"  # type: ignore[assignment]
    shortest: int = Field(default=30, ge=0)
    longest: int = Field(default=80, ge=1)
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

    @property
    def needs_groups(self) -> bool:
        return True


class GRPOConfig(GroupRelativeConfig):
    """Shao et al., 2024: the reward relative to its group, divided by the group's standard deviation."""

    type: Literal["grpo"] = "grpo"
    aggregation: Aggregation = "seq-mean-token-mean"
    eps: float = Field(default=1e-6, gt=0)


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
    eps: float = Field(default=1e-6, gt=0)
    overlong_longest: int | None = Field(default=None, ge=1, description="tokens; no penalty when unset")
    overlong_buffer: int = Field(
        default=64, ge=1, description="tokens before `overlong_longest` where the penalty begins"
    )


class RLOOConfig(GroupRelativeConfig):
    """Ahmadian et al., 2024: the reward minus the mean of the others in its group."""

    type: Literal["rloo"] = "rloo"


class ReinforcePlusPlusConfig(PolicyGradientConfig):
    """Hu et al., 2025: rewards whitened over the whole batch; `baseline="group"` first subtracts the group's mean."""

    type: Literal["reinforce++"] = "reinforce++"
    baseline: Literal["batch", "group"] = "batch"
    gamma: float = Field(default=1.0, gt=0, le=1)

    @property
    def needs_groups(self) -> bool:
        return self.baseline == "group"

    @model_validator(mode="after")
    def _check_gamma(self) -> Self:
        if self.baseline == "group" and self.gamma != 1:
            raise ValueError("baseline=group compares whole replies without a discount, so gamma must be 1")
        return self


class DPOConfig(UpdateConfig):
    """Rafailov et al., 2023, on every pair of a group whose rewards differ."""

    type: Literal["dpo"] = "dpo"
    beta: float = Field(default=0.5, gt=0, description="with an adapter's learning rate, 0.1 makes a policy diverge")
    kind: PairKind = "sigmoid"
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    max_kl: float | None = None

    @property
    def needs_groups(self) -> bool:
        return True

    @model_validator(mode="after")
    def _check_label_smoothing(self) -> Self:
        if self.label_smoothing and self.kind not in ("sigmoid", "robust"):
            raise ValueError(f"label_smoothing is for sigmoid and robust, not for {self.kind}")
        return self


class OnlineDPOConfig(DPOConfig):
    """Guo et al., 2024: the best against the worst reply of a group that the policy itself sampled."""

    type: Literal["online_dpo"] = "online_dpo"  # type: ignore[assignment]


class KTOConfig(UpdateConfig):
    """Ethayarajh et al., 2024: single binary labels. By default the weights balance the two classes."""

    type: Literal["kto"] = "kto"
    beta: float = Field(default=0.1, gt=0)
    kind: UnpairedKind = "kto"
    desirable_weight: float | None = Field(default=None, gt=0)
    undesirable_weight: float | None = Field(default=None, gt=0)
    max_kl: float | None = None


class CustomConfig(UpdateConfig):
    """An algorithm of another package: `module:Class`, or an entry point of the group `attune.algorithms`.

    `epochs`, `minibatches` and `max_kl` are passed to it where they are set here; otherwise its Config's defaults hold.
    The service always sets `max_kl`, to at most ATTUNE_KL_GUARD. `options` are the other fields of its Config.
    """

    type: Literal["custom"] = "custom"
    name: str = Field(min_length=1)
    max_kl: float | None = None
    options: dict[str, Any] = {}

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if misplaced := sorted(self.options.keys() & UpdateConfig.model_fields.keys()):
            raise ValueError(f"{', '.join(misplaced)} must stand beside options, not in them")
        return self


AlgorithmConfig = Annotated[
    PPOConfig
    | LengthAwarePPOConfig
    | GRPOConfig
    | DrGRPOConfig
    | DAPOConfig
    | RLOOConfig
    | ReinforcePlusPlusConfig
    | DPOConfig
    | OnlineDPOConfig
    | KTOConfig
    | CustomConfig,
    Field(discriminator="type"),
]

ALGORITHM_NAMES = frozenset(
    str(kind.model_fields["type"].default)
    for kind in get_args(get_args(AlgorithmConfig)[0])
    if kind is not CustomConfig
)
