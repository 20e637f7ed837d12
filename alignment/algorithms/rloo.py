"""RLOO (Ahmadian et al., 2024): each reply is compared with the mean of the others to the same prompt, which is an
unbiased baseline because the reply itself is not in it."""

from typing import ClassVar

from torch import Tensor

from alignment.algorithms.base import TrainData
from alignment.algorithms.groups import GroupGradient
from alignment.config.algorithm import RLOOConfig, UpdateConfig
from alignment.functional import leave_one_out_advantage


class RLOO(GroupGradient):
    Config: ClassVar[type[UpdateConfig]] = RLOOConfig

    def credit(self, data: TrainData) -> Tensor:
        return leave_one_out_advantage(data.rewards_B, data.group_B)[:, None]
