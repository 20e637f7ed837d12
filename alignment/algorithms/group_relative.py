"""Algorithms that compare each reply with the other replies to the same prompt: GRPO, Dr.GRPO and RLOO.

GRPO (Shao et al., 2024) needs no critic: the advantage of a reply is its reward relative to its group, divided by the
group's standard deviation.

Dr.GRPO (Liu et al., 2025) removes two biases of GRPO. Division by the group's standard deviation favours prompts that
are nearly always, or nearly never, answered well; division by a reply's own length favours long wrong answers. Dr.GRPO
only centres a group, and every token has the weight 1 / horizon.

RLOO (Ahmadian et al., 2024) compares each reply with the mean of the others. This baseline is unbiased because the
reply itself is not part of it.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from alignment.algorithms.policy_gradient import PolicyGradient
from alignment.config.algorithm import DrGRPOConfig, GRPOConfig, RLOOConfig, UpdateConfig
from alignment.errors import NothingToCompare
from alignment.functional import group_advantage, leave_one_out_advantage
from alignment.types import Sample, TrainData


def group_indices(samples: Sequence[Sample]) -> list[list[int]]:
    """Return the sample indices of each group of two or more. Samples without a partner are in no group."""
    indices: dict[str, list[int]] = defaultdict(list)
    for index, sample in enumerate(samples):
        if sample.group is not None:
            indices[sample.group].append(index)
    return [group for group in indices.values() if len(group) > 1]


class GroupRelative(PolicyGradient):
    """Policy gradient on groups only: a sample without a group of at least two is skipped and reported as unused."""

    def select(self, samples: Sequence[Sample]) -> list[int]:
        selected = sorted(index for group in group_indices(samples) for index in group)
        if not selected:
            raise NothingToCompare(f"No prompt of this batch of {len(samples)} samples has two replies.")
        return selected


class GRPO(GroupRelative):
    Config: ClassVar[type[UpdateConfig]] = GRPOConfig

    def compute_advantages(self, data: TrainData) -> Tensor:
        return group_advantage(data.rewards_B, data.group_B, eps=self.config.eps)[:, None]


class DrGRPO(GroupRelative):
    Config: ClassVar[type[UpdateConfig]] = DrGRPOConfig

    def compute_advantages(self, data: TrainData) -> Tensor:
        return group_advantage(data.rewards_B, data.group_B, scale_by_std=False)[:, None]


class RLOO(GroupRelative):
    Config: ClassVar[type[UpdateConfig]] = RLOOConfig

    def compute_advantages(self, data: TrainData) -> Tensor:
        return leave_one_out_advantage(data.rewards_B, data.group_B)[:, None]
