"""Algorithms that compare each reply with its group: GRPO, Dr.GRPO, RLOO, DAPO, REINFORCE++, GiGPO.

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

GiGPO (Feng et al., 2025) compares episodes as GRPO does, and adds the return of a turn relative to those of other turns
of the group in the same state (`anchor_states`).

A group is of replies to one prompt, or of episodes: several attempts of an agent at one task, each of several turns.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from alignment.algorithms.anchor_states import find_anchor_states
from alignment.algorithms.base import PolicyGradient, RLAlgorithm
from alignment.config.policy_gradient_algorithms import (
    DAPOConfig,
    DrGRPOConfig,
    GiGPOConfig,
    GRPOConfig,
    ReinforcePlusPlusConfig,
    RLOOConfig,
)
from alignment.errors import NothingToCompare
from alignment.functional import (
    anchor_state_advantage,
    group_advantage,
    leave_one_out_advantage,
    reinforce_plus_plus_advantage,
)
from alignment.tolerance import is_tie
from alignment.types import Sample, TrainData

ComparisonKey = Callable[[Sample], Hashable | None]  # samples with the same key are compared; None: with nobody


def indices_with_rivals(samples: Sequence[Sample], key: ComparisonKey) -> list[list[int]]:
    """Return the sample indices of each key with two or more attempts: replies without an episode, or episodes."""
    indices: dict[Hashable, list[int]] = defaultdict(list)
    for index, sample in enumerate(samples):
        if (value := key(sample)) is not None:
            indices[value].append(index)
    return [found for found in indices.values() if len({samples[index].episode or index for index in found}) > 1]


def group_of(sample: Sample) -> str | None:
    return sample.group


def agent_of(sample: Sample) -> tuple[str, str] | None:
    """Return the group with the agent, of turns that name one and are not rewarded by their returns."""
    if sample.group is None or sample.agent is None or sample.depth is not None:
        return None
    return sample.group, sample.agent


def depth_of(sample: Sample) -> tuple[str, str | None, int] | None:
    """Return the group with the agent and the depth in its line, of turns that are rewarded by their returns."""
    if sample.group is None or sample.depth is None:
        return None
    return sample.group, sample.agent, sample.depth


def comparison_key(sample: Sample) -> Hashable | None:
    """Return what the samples have in common that this one is compared with: the group, of returns also the depth."""
    return depth_of(sample) or group_of(sample)


def overlong_penalty(length: int, longest: int, buffer: int) -> float:
    """Return DAPO's soft punishment (Yu et al., 2025, eq. 13): 0 up to longest − buffer, then linear to −1 at longest.

    Example: with longest 80 and buffer 20 a reply of 70 tokens gets −0.5
    """
    return 0.0 - min(1.0, max(0, length - (longest - buffer)) / buffer)


class GroupRelative(PolicyGradient):
    """Policy gradient on groups only: a sample without a group of at least two is skipped and reported as unused.

    The statistics of a group of episodes are those of the episodes, however many turns they have. A turn that is
    rewarded by its return is compared with the turns of the same agent at the same depth: the earlier a turn, the more
    often its return is discounted. It has the advantage 0 where no other attempt has such turns. With
    `baseline_per_agent` other turns are compared with those of the same agent, where other attempts have some.
    """

    def select(self, samples: Sequence[Sample]) -> list[int]:
        selected = sorted(index for group in indices_with_rivals(samples, group_of) for index in group)
        if not selected:
            raise NothingToCompare(
                f"No prompt of this batch of {len(samples)} samples has two replies, and no group two attempts."
            )
        return selected

    def compute_advantages(self, batch: TrainData) -> Tensor:
        return self.compare(batch, batch.rewards_B)[:, None]

    def compare(self, batch: TrainData, rewards_B: Tensor) -> Tensor:
        """Return the advantage of each reward among those it is compared with, [B]; 0 where there is no other attempt.

        Raises SingletonGroup for a sample that `select` leaves out.
        """
        advantages_B = self.advantage(rewards_B, batch.group_B, batch.attempt_B)
        is_return_B = torch.tensor([sample.depth is not None for sample in batch.samples], device=rewards_B.device)
        advantages_B = advantages_B.masked_fill(is_return_B, 0.0)
        for key in (agent_of, depth_of) if self.config.baseline_per_agent else (depth_of,):
            if sets := indices_with_rivals(batch.samples, key):
                rows = [index for indices in sets for index in indices]
                labels = [label for label, indices in enumerate(sets) for _ in indices]
                labels_C = torch.tensor(labels, device=rewards_B.device)
                advantages_B[rows] = self.advantage(rewards_B[rows], labels_C, batch.attempt_B[rows])
        return advantages_B

    def advantage(self, rewards_B: Tensor, group_B: Tensor, attempt_B: Tensor) -> Tensor:
        """Return the advantage of each reward among those of its group, [B], of which each has two attempts or more."""
        raise NotImplementedError


class GRPO(GroupRelative):
    Config = GRPOConfig

    def advantage(self, rewards_B: Tensor, group_B: Tensor, attempt_B: Tensor) -> Tensor:
        return group_advantage(rewards_B, group_B, eps=self.config.eps, attempt_B=attempt_B)


class DrGRPO(GroupRelative):
    Config = DrGRPOConfig

    def advantage(self, rewards_B: Tensor, group_B: Tensor, attempt_B: Tensor) -> Tensor:
        return group_advantage(rewards_B, group_B, scale_by_std=False, attempt_B=attempt_B)


class RLOO(GroupRelative):
    Config = RLOOConfig

    def advantage(self, rewards_B: Tensor, group_B: Tensor, attempt_B: Tensor) -> Tensor:
        return leave_one_out_advantage(rewards_B, group_B, attempt_B=attempt_B)


class GiGPO(GroupRelative):
    Config = GiGPOConfig

    def __init__(self, config: GiGPOConfig) -> None:
        super().__init__(config)
        self._shared_states = 0.0  # the share of turns whose state another turn of the group has

    def compute_advantages(self, batch: TrainData) -> Tensor:
        config = self.config
        state_B = batch.group_B.new_tensor(find_anchor_states(batch.samples))
        returns_B = batch.rewards_B.new_tensor([sample.turn_return or 0.0 for sample in batch.samples])
        num_shared = int((torch.bincount(state_B) > 1)[state_B].sum())
        self._shared_states = num_shared / len(batch.samples)
        step_B = anchor_state_advantage(returns_B, state_B, scale_by_std=config.scale_by_std, eps=config.eps)
        advantages_B: Tensor = self.compare(batch, batch.rewards_B) + config.step_weight * step_B
        return advantages_B[:, None]

    def advantage(self, rewards_B: Tensor, group_B: Tensor, attempt_B: Tensor) -> Tensor:
        config = self.config
        return group_advantage(
            rewards_B, group_B, scale_by_std=config.scale_by_std, eps=config.eps, attempt_B=attempt_B
        )

    def get_metrics(self) -> dict[str, float]:
        return super().get_metrics() | {"critic/shared_states": self._shared_states}


class DAPO(GroupRelative):
    Config = DAPOConfig

    def select(self, samples: Sequence[Sample]) -> list[int]:
        compared = indices_with_rivals(samples, comparison_key)
        varied = [group for group in compared if not is_tie([self._reward(samples[index]) for index in group])]
        if not varied:
            raise NothingToCompare(f"No group of this batch of {len(samples)} samples has two different rewards.")
        return sorted(index for group in varied for index in group)

    def compute_advantages(self, batch: TrainData) -> Tensor:
        rewards_B = torch.tensor([self._reward(sample) for sample in batch.samples]).to(batch.rewards_B)
        return self.compare(batch, rewards_B)[:, None]

    def advantage(self, rewards_B: Tensor, group_B: Tensor, attempt_B: Tensor) -> Tensor:
        return group_advantage(rewards_B, group_B, eps=self.config.eps, attempt_B=attempt_B)

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
        has_groups = self.config.baseline == "group"
        return reinforce_plus_plus_advantage(
            rewards_BT,
            mask_BT,
            gamma=self.config.gamma,
            group_B=batch.group_B if has_groups else None,
            attempt_B=batch.attempt_B if has_groups else None,
            weights_B=batch.weights_B,
        )
