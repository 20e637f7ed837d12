"""What a policy's training is made of, besides its algorithm: small frozen values that just work."""

from typing import Literal

from pydantic import Field, model_validator

from alignment.config.algorithm import AlgorithmConfig, Frozen, PPOConfig


class LoRAConfig(Frozen):
    """The adapter's shape. It is fixed for a policy's life: the engine is launched for it."""

    rank: int = Field(default=8, ge=1)
    alpha: int = Field(default=16, ge=1)
    target_modules: tuple[str, ...] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), min_length=1
    )


class CriticConfig(Frozen):
    """The critic's adapter and rate. Values are learned from nothing, so it goes faster than the actor."""

    rank: int = Field(default=8, ge=1)
    lr: float = Field(default=1e-3, gt=0)


class RewardModelConfig(Frozen):
    """How a reward model is fitted: always anew, by AdamW with a rate that falls to a tenth. Its adapter has the shape
    of the policy's own."""

    lr: float = Field(default=3e-4, gt=0)
    weight_decay: float = Field(default=0.01, ge=0)
    batch_words: int = Field(default=32, ge=1, description="pairs and thumbs of one step")
    min_steps: int = Field(default=120, ge=1, description="few words are read over and over until so many steps")
    max_epochs: int = Field(default=8, ge=1, description="but never more often than this")
    held_out: float = Field(default=0.2, gt=0, lt=0.5, description="share of the words that it is measured on")
    min_held_out: int = Field(default=10, ge=2, description="words; with fewer nothing is known of the model")


class OptimConfig(Frozen):
    """AdamW. Adapters take ten times the rate of full weights; models under 10 M ten times more again."""

    lr: float = Field(default=3e-4, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    total_steps: int | None = Field(default=None, ge=1, description="where linear and cosine end")
    final_share: float = Field(default=0.1, ge=0, le=1, description="of lr, from total_steps on")

    @model_validator(mode="after")
    def _an_end(self) -> "OptimConfig":
        if self.schedule != "constant" and self.total_steps is None:
            raise ValueError(f"a {self.schedule} schedule needs total_steps")
        return self


class TrainerConfig(Frozen):
    """Everything a learner is built from, besides the base model."""

    algorithm: AlgorithmConfig = PPOConfig()
    lora: LoRAConfig | None = Field(default=LoRAConfig(), description="None trains all weights")
    critic: CriticConfig = CriticConfig()
    optim: OptimConfig = OptimConfig()
    reward_model: RewardModelConfig | None = Field(default=None, description="None makes no room for one")
    microbatch_tokens: int = Field(default=2048, ge=1)
    packing: Literal["tree", "chain", "off"] = Field(
        default="tree",
        description="what shares a row: sequences that begin alike, only those that continue one another, or nothing",
    )
    logits_chunk: int = Field(default=1 << 24, ge=1, description="the most logits that are in memory at a time")
    gradient_checkpointing: bool = False
    max_mismatch: float = Field(
        default=0.5, gt=0, description="|recorded − recomputed| log-prob in the mean, beyond which a batch is refused"
    )
    seed: int = Field(default=0, ge=0)
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
