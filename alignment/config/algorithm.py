"""Settings that algorithms share: those of an update, and the correction for stale samples. Torch-free."""

from typing import Literal, Self

from pydantic import Field, model_validator

from alignment.config.frozen_model import Frozen

CorrectionLevel = Literal["token", "sequence"]
CorrectionMode = Literal["off", "truncate", "mask", "clamp", "reject"]


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


class UpdateConfig(Frozen):
    """One update: `epochs` passes over the batch, each of `minibatches` optimizer steps."""

    epochs: int = Field(default=1, ge=1, description="passes over a batch")
    minibatches: int = Field(default=4, ge=1, description="optimizer steps of a pass")
    max_kl: float | None = Field(
        default=None,
        gt=0,
        description="an update makes no further step at this KL per token (k3) from the policy before it, on that "
        "policy's replies in the batch; samples without a step return. When unset trainer.kl_target alone bounds it",
    )

    @property
    def needs_groups(self) -> bool:
        """Whether the algorithm learns from groups alone: from two or more replies to one prompt."""
        return False

    @property
    def compares_episodes(self) -> bool:
        """Whether it can learn from groups of episodes: by their rewards, whatever the prompts of their turns are."""
        return False

    @property
    def min_contrast(self) -> float:
        """Return the difference of rewards that two replies must exceed to be compared."""
        return 0.0
