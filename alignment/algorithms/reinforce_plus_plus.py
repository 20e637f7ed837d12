"""REINFORCE++ (Hu et al., 2025): rewards whitened over all tokens of the batch, which needs neither critic nor groups.

With `baseline="group"` the mean of a reply's group goes first, and the whitening scales what is left.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from alignment.algorithms.base import RLAlgorithm, TrainData
from alignment.algorithms.groups import GroupGradient
from alignment.config.algorithm import ReinforcePlusPlusConfig, UpdateConfig
from alignment.functional import reinforce_plus_plus_advantage
from alignment.types import Sample


class ReinforcePlusPlus(GroupGradient):
    Config: ClassVar[type[UpdateConfig]] = ReinforcePlusPlusConfig

    def select(self, samples: Sequence[Sample]) -> list[int]:
        return super().select(samples) if self.config.baseline == "group" else RLAlgorithm.select(self, samples)

    def credit(self, data: TrainData) -> Tensor:
        last_B1 = data.length_B.long()[:, None] - 1
        rewards_BT = torch.zeros_like(data.mask_BT).scatter(1, last_B1, data.rewards_B[:, None])
        group_B = data.group_B if self.config.baseline == "group" else None
        return reinforce_plus_plus_advantage(rewards_BT, data.mask_BT, gamma=self.config.gamma, group_B=group_B)
