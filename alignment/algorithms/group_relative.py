"""Algorithms that compare each reply with the other replies to the same prompt: GRPO, Dr.GRPO, RLOO, DAPO, REINFORCE++.

GRPO (Shao et al., 2024) needs no critic: the advantage of a reply is its reward relative to its group, divided by the
group's standard deviation.

Dr.GRPO (Liu et al., 2025) removes two biases of GRPO. Division by the group's standard deviation favours prompts that
are nearly always, or nearly never, answered well; division by a reply's own length favours long wrong answers. Dr.GRPO
only centres a group, and every token has the weight 1 / horizon.

RLOO (Ahmadian et al., 2024) compares each reply with the mean of the others. This baseline is unbiased because the
reply itself is not part of it.

DAPO (Yu et al., 2025) is GRPO with clip-higher, equal weight for every token, no KL, and

- dynamic sampling: a group with equal rewards carries no signal and is skipped before anything is computed;
- soft overlong punishment: the reward falls linearly over the last tokens before the length limit.

REINFORCE++ (Hu et al., 2025) whitens the rewards over all tokens of the batch. It needs neither a critic nor groups.
With `baseline="group"` the group's mean is subtracted from each reward before the whitening.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from alignment.algorithms.base import PolicyGradient, RLAlgorithm
from alignment.config.algorithm import DAPOConfig, DrGRPOConfig, GRPOConfig, ReinforcePlusPlusConfig, RLOOConfig
from alignment.errors import NothingToCompare
from alignment.functional import group_advantage, leave_one_out_advantage, reinforce_plus_plus_advantage
from alignment.tolerance import is_tie
from alignment.types import Sample, TrainData


def group_indices(samples: Sequence[Sample]) -> list[list[int]]:
    """Return the sample indices of each group of two or more. Samples without a partner are in no group."""
    indices: dict[str, list[int]] = defaultdict(list)
    for index, sample in enumerate(samples):
        if sample.group is not None:
            indices[sample.group].append(index)
    return [group for group in indices.values() if len(group) > 1]


def overlong_penalty(length: int, longest: int, buffer: int) -> float:
    """Return DAPO's soft punishment (Yu et al., 2025, eq. 13): 0 up to longest − buffer, then linear to −1 at longest.

    Example: with longest 80 and buffer 20 a reply of 70 tokens gets −0.5
    """
    return 0.0 - min(1.0, max(0, length - (longest - buffer)) / buffer)


class GroupRelative(PolicyGradient):
    """Policy gradient on groups only: a sample without a group of at least two is skipped and reported as unused."""

    def select(self, samples: Sequence[Sample]) -> list[int]:
        selected = sorted(index for group in group_indices(samples) for index in group)
        if not selected:
            raise NothingToCompare(f"No prompt of this batch of {len(samples)} samples has two replies.")
        return selected


class GRPO(GroupRelative):
    Config = GRPOConfig

    def compute_advantages(self, batch: TrainData) -> Tensor:
        return group_advantage(batch.rewards_B, batch.group_B, eps=self.config.eps)[:, None]


class DrGRPO(GroupRelative):
    Config = DrGRPOConfig

    def compute_advantages(self, batch: TrainData) -> Tensor:
        return group_advantage(batch.rewards_B, batch.group_B, scale_by_std=False)[:, None]


class RLOO(GroupRelative):
    Config = RLOOConfig

    def compute_advantages(self, batch: TrainData) -> Tensor:
        return leave_one_out_advantage(batch.rewards_B, batch.group_B)[:, None]


class DAPO(GroupRelative):
    Config = DAPOConfig

    def select(self, samples: Sequence[Sample]) -> list[int]:
        varied = [g for g in group_indices(samples) if not is_tie([self._reward(samples[index]) for index in g])]
        if not varied:
            raise NothingToCompare(f"No group of this batch of {len(samples)} samples has two different rewards.")
        return sorted(index for group in varied for index in group)

    def compute_advantages(self, batch: TrainData) -> Tensor:
        rewards_B = torch.tensor([self._reward(sample) for sample in batch.samples]).to(batch.rewards_B)
        return group_advantage(rewards_B, batch.group_B, eps=self.config.eps)[:, None]

    def _reward(self, sample: Sample) -> float:
        longest = self.config.overlong_longest
        if longest is None:
            return sample.reward
        return sample.reward + overlong_penalty(len(sample.output_ids), longest, self.config.overlong_buffer)


class ReinforcePlusPlus(GroupRelative):
    Config = ReinforcePlusPlusConfig

    def select(self, samples: Sequence[Sample]) -> list[int]:
        return super().select(samples) if self.config.baseline == "group" else RLAlgorithm.select(self, samples)

    def compute_advantages(self, batch: TrainData) -> Tensor:
        mask_BT, last_token_B1 = batch.response_mask_BT, batch.length_B.long()[:, None] - 1
        rewards_BT = torch.zeros_like(mask_BT).scatter(1, last_token_B1, batch.rewards_B[:, None])
        group_B = batch.group_B if self.config.baseline == "group" else None
        return reinforce_plus_plus_advantage(
            rewards_BT, mask_BT, gamma=self.config.gamma, group_B=group_B, weights_B=batch.weights_B
        )
