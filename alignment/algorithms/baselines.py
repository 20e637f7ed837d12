"""What a reward is compared with where there is no critic: the mean of earlier rewards.

A reward is never part of its own baseline. There are no earlier rewards at the first update: each reward is compared
with the mean of the others.

Votes may come hours after their reply, when the policy is many versions further and its replies are better. Each
version therefore has a baseline of its own (`VersionBaseline`). It is a weighted mean of rewards, so that it lies
within their range however late they come. A single running mean (`RunningBaseline`) is that of Liu et al., 2025.
"""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from alignment.functional import running_baseline
from alignment.json_values import as_integer, as_list, as_number, as_object, as_text
from alignment.types import Sample

MAX_AGENTS = 64  # whose baselines are remembered
MAX_VERSIONS = 256  # whose rewards are remembered; older replies are compared with the oldest of them


class Baseline(Protocol):
    """Compares rewards with those of earlier batches, and remembers them."""

    @property
    def value(self) -> float:
        """Return what a reply of the newest version is compared with."""
        ...

    def compare(self, rewards_B: Tensor, samples: Sequence[Sample]) -> Tensor:
        """Return each reward minus its baseline, [B], and remember the rewards, with the weights of their samples."""
        ...

    def state_dict(self) -> dict[str, object]: ...

    def load_state_dict(self, state: dict[str, object]) -> None: ...


class VersionRewards(NamedTuple):
    """The rewards of a version's replies: the sum of their weights, and of the rewards times their weights."""

    weight: float
    total: float


class VersionBaseline:
    """A baseline for each version: the mean of the rewards of all versions, those of distant ones with less weight.

    b(v) = Σ_u d_u · S_u / Σ_u d_u · W_u, d_u = decay^|u − v|, with the sum S_u of u's weighted rewards and W_u of their
    weights. While replies are of the newest version, and the batches of equal size, this is a running mean with that
    decay, without an initial value.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.rewards: dict[int, VersionRewards] = {}
        self.prior: float | None = None  # of a state without rewards by version, until there are some

    @property
    def value(self) -> float:
        return self._mean_near(max(self.rewards)) if self.rewards else self.prior or 0.0

    def compare(self, rewards_B: Tensor, samples: Sequence[Sample]) -> Tensor:
        if self.rewards:
            baselines = {version: self._mean_near(version) for version in {sample.version for sample in samples}}
            advantages_B = rewards_B - rewards_B.new_tensor([baselines[sample.version] for sample in samples])
        else:
            advantages_B = compare_with_others(rewards_B, samples) if self.prior is None else rewards_B - self.prior
        for sample, reward in zip(samples, rewards_B.tolist(), strict=True):
            weight, total = self.rewards.get(sample.version, (0.0, 0.0))
            self.rewards[sample.version] = VersionRewards(weight + sample.weight, total + sample.weight * reward)
        self.rewards = {version: self.rewards[version] for version in sorted(self.rewards)[-MAX_VERSIONS:]}
        return advantages_B

    def state_dict(self) -> dict[str, object]:
        prior = {} if self.rewards or self.prior is None else {"baseline": self.prior}
        return prior | {"version_rewards": [[version, *one] for version, one in sorted(self.rewards.items())]}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.rewards = {}
        for row in as_list(state.get("version_rewards", [])):
            version, weight, total = as_list(row)
            self.rewards[as_integer(version)] = VersionRewards(as_number(weight), as_number(total))
        self.prior = as_number(state["baseline"]) if "baseline" in state else None

    def _mean_near(self, version: int) -> float:
        nearest = min(abs(other - version) for other in self.rewards)  # so that no factor underflows
        factors = {other: self.decay ** (abs(other - version) - nearest) for other in self.rewards}
        weight = sum(factor * self.rewards[other].weight for other, factor in factors.items())
        return sum(factor * self.rewards[other].total for other, factor in factors.items()) / weight


class RunningBaseline:
    """One running mean for the replies of all versions, which begins with the first batch instead of an initial value.

    The bias correction is that of Kingma and Ba, 2015.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.value = 0.0
        self.weight = 0.0  # of all rewards in the running sum, of which the baseline is the average

    def compare(self, rewards_B: Tensor, samples: Sequence[Sample]) -> Tensor:
        is_first, decay = self.weight == 0, self.decay * self.weight
        self.weight = decay + 1 - self.decay
        weights_B = _weights(rewards_B, samples)
        advantages_B, self.value = running_baseline(rewards_B, self.value, decay / self.weight, weights_B)
        return compare_with_others(rewards_B, samples) if is_first else advantages_B

    def state_dict(self) -> dict[str, object]:
        return {"baseline": self.value, "baseline_weight": self.weight}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.value = as_number(state.get("baseline", 0.0))
        self.weight = as_number(state.get("baseline_weight", 1.0 if "baseline" in state else 0.0))


class AgentBaselines:
    """A baseline for each agent of episodes, by its name, and one for the replies without (Liu et al., 2025)."""

    def __init__(self, make: Callable[[], Baseline]) -> None:
        self.make = make
        self.by_agent: dict[str, Baseline] = {}  # the one that was used last is the last one

    @property
    def value(self) -> float:
        """Return the mean of the agents' baselines."""
        return fmean(baseline.value for baseline in self.by_agent.values()) if self.by_agent else 0.0

    def compare(self, rewards_B: Tensor, samples: Sequence[Sample]) -> Tensor:
        rows: dict[str, list[int]] = {}
        for row, sample in enumerate(samples):
            rows.setdefault(sample.agent or "", []).append(row)
        advantages_B = torch.zeros_like(rewards_B)
        for agent, indices in sorted(rows.items()):
            baseline = self.by_agent.pop(agent, None) or self.make()
            advantages_B[indices] = baseline.compare(rewards_B[indices], [samples[index] for index in indices])
            self.by_agent[agent] = baseline
        self.by_agent = dict(list(self.by_agent.items())[-MAX_AGENTS:])
        return advantages_B

    def state_dict(self) -> dict[str, object]:
        return {"agents": [[agent, baseline.state_dict()] for agent, baseline in self.by_agent.items()]}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.by_agent = {}
        for row in as_list(state.get("agents", [])):
            agent, own = as_list(row)
            baseline = self.by_agent[as_text(agent)] = self.make()
            baseline.load_state_dict(as_object(own))


def compare_with_others(rewards_B: Tensor, samples: Sequence[Sample]) -> Tensor:
    """Return each reward minus the weighted mean of the others, [B]; 0 for a single one.

    The others are those of other episodes: the turns of one episode have one outcome.
    """
    numbers: dict[str, int] = {}
    names = [sample.episode or f"alone {index}" for index, sample in enumerate(samples)]
    episode_B = torch.tensor([numbers.setdefault(name, len(numbers)) for name in names], device=rewards_B.device)
    if len(numbers) == 1:
        return torch.zeros_like(rewards_B)
    weights_B = _weights(rewards_B, samples)
    sums_B = torch.stack([weights_B, weights_B * rewards_B])
    sums_E = sums_B.new_zeros(2, len(numbers)).index_add(1, episode_B, sums_B)
    weight_B, total_B = (sums_E.sum(1, keepdim=True) - sums_E)[:, episode_B]
    advantages_B: Tensor = rewards_B - total_B / weight_B
    return advantages_B


def _weights(rewards_B: Tensor, samples: Sequence[Sample]) -> Tensor:
    return rewards_B.new_tensor([sample.weight for sample in samples])
