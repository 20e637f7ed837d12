"""Trainer settings other than those of the algorithm: adapters, critic, optimizer, reward model. Torch-free."""

from typing import Literal

from pydantic import Field, model_validator

from alignment.config.algorithm_choice import AlgorithmConfig
from alignment.config.frozen_model import Frozen
from alignment.config.policy_gradient_algorithms import PPOConfig

Packing = Literal["tree", "chain", "off"]


class LoRAConfig(Frozen):
    """The shape of the adapter. It cannot change later, because the engine is launched for it."""

    r: int = Field(default=8, ge=1, description="rank")
    alpha: int = Field(default=16, ge=1, description="the adapter's output is scaled by alpha / r")
    target_modules: tuple[str, ...] | None = Field(
        default=None,
        min_length=1,
        description="linear layers that get an adapter; when unset all of attention and, in models without experts, of "
        "the MLP that the engine can adapt",
    )


class CriticConfig(Frozen):
    """The critic's adapter and learning rate. It starts untrained, so its rate is higher than the actor's."""

    r: int | None = Field(default=None, ge=1, description="rank; that of the policy's adapter when unset")
    lr: float = Field(default=1e-3, gt=0, description="learning rate")


class RewardModelConfig(Frozen):
    """How a reward model is fitted: from scratch, by AdamW with a learning rate that decays to a tenth.

    Its adapter has the same shape as the policy's.
    """

    lr: float = Field(default=3e-4, gt=0, description="learning rate; that of trainer.optim when unset")
    weight_decay: float = Field(default=0.01, ge=0, description="of AdamW")
    batch_size: int = Field(default=32, ge=1, description="pairs and labels per step")
    min_steps: int = Field(default=120, ge=1, description="small datasets are repeated until this many steps")
    max_epochs: int = Field(default=20, ge=1, description="the most repetitions")
    held_out: float = Field(default=0.2, gt=0, lt=0.5, description="share of the feedback for evaluation")
    min_held_out: int = Field(
        default=10, ge=2, description="pieces of feedback; with fewer the model cannot be evaluated"
    )


class OptimConfig(Frozen):
    """AdamW. Adapters need ten times the learning rate of full weights; models under 10 M ten times more again."""

    lr: float = Field(
        default=3e-4,
        gt=0,
        description='learning rate; a tenth of the default where adaptation = "full" and it is unset',
    )
    betas: tuple[float, float] = Field(default=(0.9, 0.999), description="decay of AdamW's two averages")
    eps: float = Field(default=1e-8, gt=0, description="of AdamW")
    weight_decay: float = Field(default=0.0, ge=0, description="of AdamW")
    max_grad_norm: float = Field(default=1.0, gt=0, description="larger gradients are scaled to this norm")
    schedule: Literal["constant", "linear", "cosine"] = Field(default="constant", description="of the learning rate")
    warmup_steps: int = Field(default=0, ge=0, description="optimizer steps in which the learning rate rises")
    total_steps: int | None = Field(default=None, ge=1, description="the last step of linear and cosine")
    final_share: float = Field(
        default=0.1, ge=0, le=1, description="final learning rate as a share of lr, from total_steps on"
    )

    @model_validator(mode="after")
    def _check_total_steps(self) -> "OptimConfig":
        if self.schedule != "constant" and self.total_steps is None:
            raise ValueError(f"a {self.schedule} schedule needs total_steps")
        return self


class TrainerConfig(Frozen):
    """All settings of a trainer, without the base model."""

    algorithm: AlgorithmConfig = PPOConfig()
    lora: LoRAConfig | None = Field(default=LoRAConfig(), description="None trains the full weights")
    critic: CriticConfig = CriticConfig()
    optim: OptimConfig = OptimConfig()
    reward_model: RewardModelConfig | None = Field(default=None, description="None disables it")
    micro_batch_tokens: int = Field(default=2048, ge=1)
    packing: Packing = Field(
        default="tree",
        description="sequences that share a row: with a common prefix, those that continue one another, or none",
    )
    logits_chunk: int = Field(default=1 << 24, ge=1, description="the most logits in memory at a time")
    activation_checkpointing: bool = False
    dp_shard: int | None = Field(default=None, ge=1, description="ranks that share one copy of the weights; None: all")
    kl_target: float | None = Field(
        default=None, gt=0, description="largest KL(old ‖ new policy) per token of an update, which is scaled to fit"
    )
    max_mismatch: float = Field(
        default=0.5,
        gt=0,
        description="largest mean |recorded − recomputed| log-prob of the replies of the policy before the update; "
        "a batch above it is refused",
    )
    seed: int = Field(default=0, ge=0)
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
