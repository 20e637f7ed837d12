"""GRPO (Shao et al., 2024): no critic; a reply is as good as it is better than the others to the same prompt."""

from typing import ClassVar

from torch import Tensor

from alignment.algorithms.base import TrainData
from alignment.algorithms.groups import GroupGradient
from alignment.config.algorithm import GRPOConfig, UpdateConfig
from alignment.functional import group_advantage


class GRPO(GroupGradient):
    Config: ClassVar[type[UpdateConfig]] = GRPOConfig

    def credit(self, data: TrainData) -> Tensor:
        return group_advantage(data.rewards_B, data.group_B, eps=self.config.eps)[:, None]
