"""DAPO (Yu et al., 2025): GRPO with clip-higher, equal weight for every token, no KL, and

- dynamic sampling: a group with equal rewards carries no signal and is skipped before anything is computed;
- soft overlong punishment: the reward falls linearly over the last tokens before the length limit.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from alignment.algorithms.group_relative import GroupRelative, group_indices
from alignment.config.algorithm import DAPOConfig, UpdateConfig
from alignment.errors import NothingToCompare
from alignment.functional import group_advantage
from alignment.signals.length_penalty import overlong_penalty
from alignment.types import Sample, TrainData


class DAPO(GroupRelative):
    Config: ClassVar[type[UpdateConfig]] = DAPOConfig

    def select(self, samples: Sequence[Sample]) -> list[int]:
        varied = [g for g in group_indices(samples) if len({self._reward(samples[index]) for index in g}) > 1]
        if not varied:
            raise NothingToCompare(f"No group of this batch of {len(samples)} samples has two different rewards.")
        return sorted(index for group in varied for index in group)

    def compute_advantages(self, data: TrainData) -> Tensor:
        rewards_B = torch.tensor([self._reward(sample) for sample in data.samples]).to(data.rewards_B)
        return group_advantage(rewards_B, data.group_B, eps=self.config.eps)[:, None]

    def _reward(self, sample: Sample) -> float:
        longest = self.config.overlong_longest
        if longest is None:
            return sample.reward
        return sample.reward + overlong_penalty(len(sample.output_ids), longest, self.config.overlong_buffer)
