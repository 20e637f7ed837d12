"""Every algorithm's settings: frozen values, told apart by `type`, whose defaults are the vetted recipe.

No torch here, so that whoever only configures a learner need not load one.
"""

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
    """A value: unknown fields are refused, known ones never change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class CorrectionConfig(Frozen):
    """What to do about samples that another version, or another engine, drew. Weights are proximal / behaviour."""

    level: CorrectionLevel = "token"
    mode: CorrectionMode = "truncate"
    low: float = Field(default=0.0, ge=0)
    high: float = Field(default=2.0, gt=0)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low ({self.low}) must lie below high ({self.high})")
        return self


class AdaptiveKLConfig(Frozen):
    """Moves kl_coef so that the KL to the base model tends to `target`; keep that below the KL guard."""

    target: float = Field(default=0.01, gt=0)
    horizon: int = Field(default=10_000, ge=1, description="samples")


class UpdateConfig(Frozen):
    """One batch, learned from `epochs` times in `minibatches` steps each."""

    epochs: int = Field(default=1, ge=1)
    minibatches: int = Field(default=4, ge=1)
    max_kl: float | None = Field(default=0.1, gt=0, description="k3(parent, policy) a token at which an update stops")


class PolicyGradientConfig(UpdateConfig):
    """What all policy gradients share: the loss, the correction for stale samples, and the KL to the base model."""

    loss: PolicyLossKind = "ppo"
    clip_low: float = Field(default=0.2, gt=0)
    clip_high: float = Field(default=0.2, gt=0)
    clip_c: float | None = Field(default=3.0, gt=1, description="bound of the ratio where the advantage is negative")
    aggregation: Aggregation = "token-mean"
    horizon: int = Field(default=512, ge=1, description="tokens, for seq-mean-token-sum-norm")
    kl_coef: float = Field(default=0.01, ge=0)
    kl_kind: KLKind = "k3"
    kl_control: AdaptiveKLConfig | None = None
    correction: CorrectionConfig = CorrectionConfig()
    proximal: Literal["recompute", "loglinear", "rollout"] = Field(
        default="recompute",
        description="the policy that ratios are taken to: the parent scored anew, interpolated, or as recorded",
    )

    @model_validator(mode="after")
    def _something_to_adapt(self) -> Self:
        if self.kl_control and not self.kl_coef:
            raise ValueError("kl_control moves kl_coef by factors, so kl_coef cannot begin at 0")
        return self


class PPOConfig(PolicyGradientConfig):
    """PPO for one answer per prompt.

    `estimator="running_baseline"` compares a reward with the mean of earlier batches; "gae" with a critic's values.
    `whiten="scale"` divides by the batch's deviation and leaves the centre to the baseline; "full" also subtracts
    the batch's mean, which takes any common shift with it.
    """

    type: Literal["ppo"] = "ppo"
    estimator: Literal["running_baseline", "gae"] = "running_baseline"
    baseline_decay: float = Field(default=0.7, ge=0, lt=1)
    whiten: Literal["scale", "full", "off"] = "scale"
    gamma: float = Field(default=1.0, gt=0, le=1)
    lam: float = Field(default=1.0, ge=0, le=1)
    turn_discount: float = Field(
        default=0.0, ge=0, le=1, description="share of a later turn's reward that an earlier one gets"
    )
    kl_in: Literal["loss", "reward"] = "loss"
    value_clip: float | None = Field(default=0.5, gt=0)
    value_coef: float = Field(default=1.0, gt=0)


class LengthAwarePPOConfig(PPOConfig):
    """PPO whose reward also asks for a length between `shortest` and `longest` tokens."""

    type: Literal["length_aware_ppo"] = "length_aware_ppo"  # type: ignore[assignment]
    shortest: int = Field(default=30, ge=0)
    longest: int = Field(default=80, ge=1)
    length_share: float = Field(default=0.1, ge=0, le=1, description="of the batch's mean |reward|: the worst penalty")
    drift_patience: int = Field(default=3, ge=1, description="batches in a row out of range, before it is tightened")
    drift_step: int = Field(default=2, ge=0, description="tokens")

    @model_validator(mode="after")
    def _a_range(self) -> Self:
        if self.shortest >= self.longest:
            raise ValueError(f"shortest ({self.shortest}) must lie below longest ({self.longest})")
        return self


class GRPOConfig(PolicyGradientConfig):
    """Shao et al., 2024: a reward against the others' of its group, over the group's deviation."""

    type: Literal["grpo"] = "grpo"
    aggregation: Aggregation = "seq-mean-token-mean"
    eps: float = Field(default=1e-6, gt=0)


class DrGRPOConfig(PolicyGradientConfig):
    """Liu et al., 2025: no division by the deviation, and no length in the denominator."""

    type: Literal["dr_grpo"] = "dr_grpo"
    aggregation: Aggregation = "seq-mean-token-sum-norm"
    kl_coef: float = Field(default=0.0, ge=0)


class DAPOConfig(PolicyGradientConfig):
    """Yu et al., 2025: clip-higher, token mean, no KL, groups without variance left out, soft overlong penalty."""

    type: Literal["dapo"] = "dapo"
    clip_high: float = Field(default=0.28, gt=0)
    kl_coef: float = Field(default=0.0, ge=0)
    eps: float = Field(default=1e-6, gt=0)
    overlong_longest: int | None = Field(default=None, ge=1, description="tokens; no penalty when unset")
    overlong_buffer: int = Field(default=64, ge=1, description="tokens before `overlong_longest` where it sets in")


class RLOOConfig(PolicyGradientConfig):
    """Ahmadian et al., 2024: a reward against the mean of the others of its group."""

    type: Literal["rloo"] = "rloo"


class ReinforcePlusPlusConfig(PolicyGradientConfig):
    """Hu et al., 2025: rewards whitened over the whole batch; with `baseline="group"` the group's mean goes first."""

    type: Literal["reinforce++"] = "reinforce++"
    baseline: Literal["batch", "group"] = "batch"
    gamma: float = Field(default=1.0, gt=0, le=1)

    @model_validator(mode="after")
    def _one_reward_a_reply(self) -> Self:
        if self.baseline == "group" and self.gamma != 1:
            raise ValueError("baseline=group compares whole replies, which leaves nothing to discount: gamma must be 1")
        return self


class DPOConfig(UpdateConfig):
    """Rafailov et al., 2023, on every pair of a group whose rewards differ: what people compared."""

    type: Literal["dpo"] = "dpo"
    beta: float = Field(default=0.5, gt=0, description="0.1, at the rates of adapters, lets a policy fall apart")
    kind: PairKind = "sigmoid"
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    max_kl: float | None = None

    @model_validator(mode="after")
    def _smoothing_where_it_is_defined(self) -> Self:
        if self.label_smoothing and self.kind not in ("sigmoid", "robust"):
            raise ValueError(f"label_smoothing belongs to sigmoid and robust, not to {self.kind}")
        return self


class OnlineDPOConfig(DPOConfig):
    """Guo et al., 2024: the best against the worst of a group that the policy itself drew."""

    type: Literal["online_dpo"] = "online_dpo"  # type: ignore[assignment]


class KTOConfig(UpdateConfig):
    """Ethayarajh et al., 2024: thumbs, each for itself; weights balance their numbers when unset."""

    type: Literal["kto"] = "kto"
    beta: float = Field(default=0.1, gt=0)
    kind: UnpairedKind = "kto"
    desirable_weight: float | None = Field(default=None, gt=0)
    undesirable_weight: float | None = Field(default=None, gt=0)
    max_kl: float | None = None


class CustomConfig(UpdateConfig):
    """Somebody else's algorithm: `module:Class`, or the name of an entry point in the group `attune.algorithms`.

    `epochs`, `minibatches` and `max_kl` are passed on where they are named here; otherwise its own Config's hold.
    """

    type: Literal["custom"] = "custom"
    name: str = Field(min_length=1)
    options: dict[str, Any] = {}


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
