"""What a policy's training is made of: small frozen values whose defaults are the vetted recipe."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

KLKind = Literal["k1", "k2", "k3"]
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]


class Frozen(BaseModel):
    """A value: unknown fields are refused, known ones never change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class LoRAConfig(Frozen):
    """The adapter's shape. It is fixed for a policy's life: the engine is launched for it."""

    rank: int = Field(default=8, ge=1)
    alpha: int = Field(default=16, ge=1)
    target_modules: tuple[str, ...] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), min_length=1
    )


class OptimConfig(Frozen):
    """AdamW. Adapters take ten times the rate of full weights; models under 10 M ten times more again."""

    lr: float = Field(default=3e-4, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)


class PPOConfig(Frozen):
    """Decoupled PPO with a truncated rollout weight, a running baseline and batch whitening.

    `whiten="scale"` divides by the batch's deviation and leaves the centre to the running baseline; "full" also
    subtracts the batch's mean, which takes any common shift with it: the baseline then moves no gradient.
    """

    type: Literal["ppo"] = "ppo"
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float = Field(default=0.2, gt=0)
    clip_c: float = Field(default=3.0, gt=1)
    rollout_cap: float = Field(default=2.0, ge=1)
    kl_coef: float = Field(default=1e-3, ge=0)
    kl_kind: KLKind = "k3"
    epochs: int = Field(default=1, ge=1)
    minibatches: int = Field(default=4, ge=1)
    aggregation: Aggregation = "token-mean"
    baseline_decay: float = Field(default=0.7, ge=0, lt=1)
    whiten: Literal["scale", "full", "off"] = "scale"


class TrainerConfig(Frozen):
    """Everything a learner is built from, besides the base model."""

    algorithm: PPOConfig = PPOConfig()
    lora: LoRAConfig = LoRAConfig()
    optim: OptimConfig = OptimConfig()
    microbatch_tokens: int = Field(default=2048, ge=1)
    seed: int = Field(default=0, ge=0)
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
