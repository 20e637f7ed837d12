"""DAPO (Yu et al., 2025): GRPO with the clip higher above than below, every token weighing the same, no KL, and

- dynamic sampling: groups whose rewards are all the same say nothing, and are left out before anything is computed;
- soft overlong punishment: the reward falls off over the last tokens before a reply is too long.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from alignment.algorithms.base import TrainData
from alignment.algorithms.policy_gradient import PolicyGradient
from alignment.errors import NothingToCompare
from alignment.functional import group_advantage
from alignment.recipes import DAPOConfig, Frozen
from alignment.samples import Sample
from alignment.shaping import overlong_penalty


class DAPO(PolicyGradient):
    Config: ClassVar[type[Frozen]] = DAPOConfig

    def select(self, samples: Sequence[Sample]) -> list[int]:
        rewards: dict[str | None, set[float]] = defaultdict(set)
        for sample in samples:
            rewards[sample.group].add(self._reward(sample))
        kept = [index for index, sample in enumerate(samples) if len(rewards[sample.group]) > 1 and sample.group]
        if not kept:
            raise NothingToCompare(f"No group of this batch of {len(samples)} has two different rewards.")
        return kept

    def credit(self, data: TrainData) -> Tensor:
        rewards_B = torch.tensor([self._reward(sample) for sample in data.samples]).to(data.rewards_B)
        return group_advantage(rewards_B, data.group_B, eps=self.config.eps)[:, None]

    def _reward(self, sample: Sample) -> float:
        longest = self.config.overlong_longest
        if longest is None:
            return sample.reward
        return sample.reward + overlong_penalty(len(sample.output_ids), longest, self.config.overlong_buffer)
