"""The algorithm of a trainer: a built-in one or one of another package, discriminated by `type`. Torch-free."""

from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from alignment.config.algorithm import UpdateConfig
from alignment.config.policy_gradient_algorithms import (
    DAPOConfig,
    DrGRPOConfig,
    GiGPOConfig,
    GRPOConfig,
    LengthAwarePPOConfig,
    PPOConfig,
    ReinforcePlusPlusConfig,
    RLOOConfig,
)
from alignment.config.preference_algorithms import DPOConfig, KTOConfig, OnlineDPOConfig

ALGORITHM_ENTRY_POINTS = "attune.algorithms"


class CustomConfig(UpdateConfig):
    """An algorithm of another package: `module:Class`, or an entry point of the group `attune.algorithms`.

    `epochs`, `minibatches` and `max_kl` are passed to it where they are set here; otherwise its Config's defaults hold.
    `options` are the other fields of its Config.
    """

    type: Literal["custom"] = "custom"
    name: str = Field(min_length=1, description="`module:Class`, or an entry point of the group `attune.algorithms`")
    options: dict[str, object] = Field(default={}, description="the other fields of its Config")

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
    | GiGPOConfig
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
