"""DAPO (Yu et al., 2025): GRPO with the clip higher above than below, every token weighing the same, no KL, and

- dynamic sampling: groups whose rewards are all the same say nothing, and are left out before anything is computed;
- soft overlong punishment: the reward falls off over the last tokens before a reply is too long.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from alignment.algorithms.base import TrainData
from alignment.algorithms.groups import GroupGradient, groups
from alignment.config.algorithm import DAPOConfig, UpdateConfig
from alignment.errors import NothingToCompare
from alignment.functional import group_advantage
from alignment.signals.length_penalty import overlong_penalty
from alignment.types import Sample


class DAPO(GroupGradient):
    Config: ClassVar[type[UpdateConfig]] = DAPOConfig

    def select(self, samples: Sequence[Sample]) -> list[int]:
        apart = [group for group in groups(samples) if len({self._reward(samples[index]) for index in group}) > 1]
        if not apart:
            raise NothingToCompare(f"No group of this batch of {len(samples)} has two different rewards.")
        return sorted(index for group in apart for index in group)

    def credit(self, data: TrainData) -> Tensor:
        rewards_B = torch.tensor([self._reward(sample) for sample in data.samples]).to(data.rewards_B)
        return group_advantage(rewards_B, data.group_B, eps=self.config.eps)[:, None]

    def _reward(self, sample: Sample) -> float:
        longest = self.config.overlong_longest
        if longest is None:
            return sample.reward
        return sample.reward + overlong_penalty(len(sample.output_ids), longest, self.config.overlong_buffer)
