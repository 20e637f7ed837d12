"""GRPO (Shao et al., 2024): no critic; a reply is as good as it is better than the others to the same prompt."""

from typing import ClassVar

from torch import Tensor

from alignment.algorithms.base import TrainData
from alignment.algorithms.groups import GroupGradient
from alignment.functional import group_advantage
from alignment.recipes import GRPOConfig, UpdateConfig


class GRPO(GroupGradient):
    Config: ClassVar[type[UpdateConfig]] = GRPOConfig

    def credit(self, data: TrainData) -> Tensor:
        return group_advantage(data.rewards_B, data.group_B, eps=self.config.eps)[:, None]
