"""Section of the trainer: what an update is made of, how far it may go, and how the weights are trained."""

from typing import Literal, Self

from pydantic import Field, model_validator

from alignment.config.frozen_model import Frozen
from alignment.config.trainer import (
    CriticConfig,
    LoRAConfig,
    OptimConfig,
    Packing,
    RewardModelConfig,
    TrainerConfig,
)

DEFAULTS = TrainerConfig()
DEFAULT_KL_TARGET = 0.003


class TrainerSettings(Frozen):
    """Batches, limits of an update, and the trainer itself."""

    adaptation: Literal["lora", "full"] = Field(
        "lora",
        description="what is trained: lora (an adapter) or full (all weights, docs/full-weights.md). Fixed per `home`",
    )
    ranks: int = Field(1, ge=1, description="processes of the trainer on this host")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the trainer computes")
    seed: int = Field(0, ge=0, description="seed of the trainer")

    batch_size: int = Field(24, ge=2, description="ready samples that start an update")
    max_batch_size: int | None = Field(
        None,
        ge=2,
        description="most samples of an update, where more are ready; four times `batch_size` when unset",
    )
    min_batch_size: int | None = Field(
        None,
        ge=2,
        description="fewest samples of an update after `max_wait_seconds`; a quarter of `batch_size` when unset",
    )
    max_wait_seconds: float = Field(300.0, ge=0, description="how long samples wait for a full batch")
    max_sample_age_seconds: float = Field(
        30 * 86400.0, gt=0, description="how old a reply may be that is learned from, in seconds"
    )
    max_staleness: int | None = Field(
        None, ge=0, description="versions that a sample may be behind the trained one; any number when unset"
    )

    kl_target: float | None = Field(
        None,
        gt=0,
        description="KL per token that an update may reach, below `kl_guard`: it is scaled to fit; 0.003, or half of "
        "a smaller `kl_guard`, when unset",
    )
    kl_guard: float = Field(
        0.05,
        gt=0,
        description="largest KL from the parent per token; a version above it is rejected, and training goes back",
    )
    kl_alarms: int = Field(3, ge=1, description="consecutive alarms of the KL guard that halt a policy's training")
    max_mismatch: float = Field(
        DEFAULTS.max_mismatch,
        gt=0,
        description="largest mean difference of recorded and recomputed log-probs; a batch above it is refused",
    )
    parity_check: bool = Field(
        True,
        description="before the first update compare engine and trainer on random tokens, without and with a random "
        "adapter, and do not train where they differ (docs/models.md)",
    )

    micro_batch_tokens: int = Field(
        DEFAULTS.micro_batch_tokens, ge=1, description="tokens of a forward and backward pass, on each rank"
    )
    packing: Packing = Field(
        DEFAULTS.packing,
        description="sequences that share a row: tree (with a common prefix), chain (those that continue one another), "
        "off",
    )
    logits_chunk: int = Field(DEFAULTS.logits_chunk, ge=1, description="the most logits in memory at a time")
    activation_checkpointing: bool = Field(
        DEFAULTS.activation_checkpointing, description="compute activations again in the backward pass: less memory"
    )
    dp_shard: int | None = Field(
        None,
        ge=1,
        description="ranks that share one copy of the weights, a divisor of the number of ranks; all of them when "
        "unset. 1: every rank has a copy, and gathers nothing",
    )
    lora: LoRAConfig = Field(LoRAConfig(), description="the shape of the adapter")
    critic: CriticConfig = Field(CriticConfig(), description="the critic of PPO with estimator gae or turn_gae")
    optim: OptimConfig = Field(OptimConfig(), description="AdamW")
    reward_model: RewardModelConfig = Field(
        RewardModelConfig(), description="how a reward model is fitted; its `lr` is `optim.lr` when unset"
    )

    @model_validator(mode="after")
    def _check_batch_sizes(self) -> Self:
        smallest, largest = self.min_batch_size, self.max_batch_size
        if smallest is not None and smallest > self.batch_size:
            raise ValueError(f"min_batch_size ({smallest}) must be at most batch_size ({self.batch_size})")
        if largest is not None and largest < self.batch_size:
            raise ValueError(f"max_batch_size ({largest}) must be at least batch_size ({self.batch_size})")
        return self

    @property
    def smallest_batch(self) -> int:
        return self.min_batch_size or max(2, self.batch_size // 4)

    @property
    def largest_batch(self) -> int:
        return self.max_batch_size or 4 * self.batch_size

    @property
    def update_kl_target(self) -> float:
        """The KL per token that an update may reach."""
        return self.kl_target or min(DEFAULT_KL_TARGET, self.kl_guard / 2)
