"""REINFORCE++ (Hu et al., 2025): rewards whitened over all tokens of the batch. It needs neither a critic nor groups.

With `baseline="group"` the group's mean is subtracted from each reward before the whitening.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from alignment.algorithms.base import RLAlgorithm
from alignment.algorithms.group_relative import GroupRelative
from alignment.config.algorithm import ReinforcePlusPlusConfig, UpdateConfig
from alignment.functional import reinforce_plus_plus_advantage
from alignment.types import Sample, TrainData


class ReinforcePlusPlus(GroupRelative):
    Config: ClassVar[type[UpdateConfig]] = ReinforcePlusPlusConfig

    def select(self, samples: Sequence[Sample]) -> list[int]:
        return super().select(samples) if self.config.baseline == "group" else RLAlgorithm.select(self, samples)

    def compute_advantages(self, data: TrainData) -> Tensor:
        last_token_B1 = data.length_B.long()[:, None] - 1
        rewards_BT = torch.zeros_like(data.mask_BT).scatter(1, last_token_B1, data.rewards_B[:, None])
        group_B = data.group_B if self.config.baseline == "group" else None
        return reinforce_plus_plus_advantage(rewards_BT, data.mask_BT, gamma=self.config.gamma, group_B=group_B)
