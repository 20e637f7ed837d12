"""Dr.GRPO (Liu et al., 2025): GRPO without its two biases.

Dividing by the group's deviation favours questions that are nearly always, or nearly never, answered well; dividing
by a reply's own length favours long wrong answers. Here a group is only centred, and every token weighs
1 / horizon.
"""

from typing import ClassVar

from torch import Tensor

from alignment.algorithms.base import TrainData
from alignment.algorithms.groups import GroupGradient
from alignment.config.algorithm import DrGRPOConfig, UpdateConfig
from alignment.functional import group_advantage


class DrGRPO(GroupGradient):
    Config: ClassVar[type[UpdateConfig]] = DrGRPOConfig

    def credit(self, data: TrainData) -> Tensor:
        return group_advantage(data.rewards_B, data.group_B, scale_by_std=False)[:, None]
