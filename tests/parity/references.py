"""Independent references, in float64 NumPy, for the formulas that no peer has.

Each reference uses another method than the implementation: loops instead of vectorised sums, pair counts instead of a
search in sorted scores, nested bisection instead of Newton's method.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from alignment import functional

Array = NDArray[np.float64]
Integers = NDArray[np.int64]
BOUND = 1e-9
# Near a minimum the objective is flat to rounding, so two methods that compare objectives stop about 1e-8 apart.
WIDER_BOUNDS = {"fit_platt_scaling": 1e-7}
BISECTION_STEPS = 80


@dataclass(frozen=True)
class Comparison:
    """The largest difference between the implementation and its reference over `num_values` results."""

    function: str
    num_values: int
    difference: float

    @property
    def bound(self) -> float:
        return WIDER_BOUNDS.get(self.function, BOUND)

    @property
    def is_within_bound(self) -> bool:
        return self.difference <= self.bound  # False for NaN


def compare_with_references(seed: int, repeats: int = 2) -> Iterator[Comparison]:
    """Compare each function with its reference on random inputs."""
    for function, measure in MEASURES.items():
        generator = np.random.default_rng(seed)
        differences = [measure(generator, size) for size in (2, 7, 60) for _ in range(repeats)]
        yield Comparison(function, len(differences), float(np.max(differences)))


def softplus(x: Array) -> Array:
    """Return log(1 + e^x) = −log σ(−x)."""
    return np.logaddexp(0.0, x)


def binary_feedback_loss(scores: Array, values: Array, bias: float) -> Array:
    """Return binary cross-entropy with soft labels, from probabilities' log-odds."""
    labels = (1 + values) / 2
    return labels * softplus(bias - scores) + (1 - labels) * softplus(scores - bias)


def platt_scaling(
    scores: Array, values: Array, weights: Array, margins: Array, pair_weights: Array, prior: float
) -> tuple[float, float]:
    """Return the scale and shift of the minimum: the root of its gradient, by nested bisection."""
    labels = (1 + values) / 2

    def gradient(scale: float, shift: float) -> tuple[float, float]:
        errors = weights * (sigmoid(scale * scores + shift) - labels)
        pair_errors = pair_weights * (sigmoid(scale * margins) - 1)
        by_scale = float(errors @ scores + pair_errors @ margins) + prior * (scale - 1)
        return by_scale, float(errors.sum()) + prior * shift

    def best_shift(scale: float) -> float:
        return bisect(lambda shift: gradient(scale, shift)[1])

    scale = bisect(lambda scale: gradient(scale, best_shift(scale))[0])
    return scale, best_shift(scale)


def bisect(increasing: Callable[[float], float], low: float = -1000.0, high: float = 1000.0) -> float:
    """Return the root of an increasing function."""
    for _ in range(BISECTION_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if increasing(middle) > 0 else (middle, high)
    return (low + high) / 2


def sigmoid(x: Array) -> Array:
    return np.exp(-softplus(-x))


def calibration_error(probabilities: Array, values: Array, weights: Array, bins: int) -> float:
    total = 0.0
    for index in range(bins):
        is_last = index == bins - 1
        upper = probabilities <= 1 if is_last else probabilities < (index + 1) / bins
        inside = (probabilities >= index / bins) & upper
        if weights[inside].sum() > 0:
            mean_probability = np.average(probabilities[inside], weights=weights[inside])
            mean_label = np.average((1 + values[inside]) / 2, weights=weights[inside])
            total += weights[inside].sum() * abs(mean_probability - mean_label)
    return float(total / weights.sum())


def auc(scores: Array, positive: NDArray[np.bool_]) -> float:
    """Return the share of (positive, negative) pairs in the right order; ties count half."""
    differences = scores[positive][:, None] - scores[~positive][None, :]
    return float(np.mean((np.sign(differences) + 1) / 2))


def discounted_turn_returns(rewards: Array, conversations: Integers, turns: Integers, discount: float) -> Array:
    """Return Σ_k discount^k · reward of the k-th next turn of the same conversation."""
    returns = np.zeros_like(rewards)
    for index, (conversation, turn) in enumerate(zip(conversations, turns, strict=True)):
        later = np.flatnonzero((conversations == conversation) & (turns >= turn))
        ordered = later[np.argsort(turns[later])]
        returns[index] = np.sum(rewards[ordered] * discount ** np.arange(len(ordered)))
    return returns


def anchor_state_advantage(returns: Array, states: Integers) -> Array:
    """Return (G − mean) / std over the turns of the state, and 0 for a state of one turn."""
    advantages = np.zeros_like(returns)
    for index, state in enumerate(states):
        same = returns[states == state]
        if len(same) > 1:
            advantages[index] = (returns[index] - same.mean()) / (same.std(ddof=1) + 1e-6)
    return advantages


def turn_gae_advantage(
    rewards: Array, returns: Array, values: Array, parents: Integers, gamma: float, lam: float
) -> Array:
    """Return the λ-returns r + γ · mean((1 − λ) V + λ G of the next turns) minus the values, by recursion."""

    def lambda_return(row: int) -> float:
        later = np.flatnonzero(parents == row)
        if not len(later):
            return float(returns[row])
        mixed = [(1 - lam) * values[one] + lam * lambda_return(int(one)) for one in later]
        return float(rewards[row] + gamma * np.mean(mixed))

    return np.array([lambda_return(row) for row in range(len(rewards))]) - values


def distribution_kl(old: Array, new: Array, num_tokens: int) -> Array:
    """Return Σ p log(p/q) over the first `num_tokens` tokens and all others as one, at each place."""
    divergences = np.zeros(len(old))
    for place, (p, q) in enumerate(zip(old, new, strict=True)):
        lumped_p = [*p[:num_tokens], p[num_tokens:].sum()]
        lumped_q = [*q[:num_tokens], q[num_tokens:].sum()]
        divergences[place] = sum(a * np.log(a / b) for a, b in zip(lumped_p, lumped_q, strict=True))
    return divergences


def _difference(ours: torch.Tensor | float, reference: Array | float) -> float:
    values = np.asarray(ours.numpy() if isinstance(ours, torch.Tensor) else ours, dtype=np.float64)
    return float(np.max(np.abs(values - np.asarray(reference)) / np.maximum(1.0, np.abs(reference))))


def _measure_binary_feedback_loss(generator: np.random.Generator, size: int) -> float:
    scores, values, bias = 4 * generator.normal(size=size), generator.uniform(-1, 1, size), float(generator.normal())
    ours = functional.binary_feedback_loss(torch.tensor(scores), torch.tensor(values), bias)
    return _difference(ours, binary_feedback_loss(scores, values, bias))


def _measure_platt_scaling(generator: np.random.Generator, size: int) -> float:
    scores, margins = 2 * generator.normal(size=size), generator.normal(size=size) + 0.5
    values = np.clip(np.sign(scores + generator.normal(size=size)) * generator.uniform(0.2, 1, size), -1, 1)
    weights, pair_weights = generator.uniform(0, 1, size), generator.uniform(0, 1, size)
    inputs = (scores, values, weights, margins, pair_weights)
    ours = functional.fit_platt_scaling(*(torch.tensor(x) for x in inputs), prior=0.7)
    return _difference(torch.tensor(ours, dtype=torch.float64), np.array(platt_scaling(*inputs, prior=0.7)))


def _measure_calibration_error(generator: np.random.Generator, size: int) -> float:
    probabilities, values = generator.uniform(0, 1, size), generator.uniform(-1, 1, size)
    weights = generator.uniform(0.1, 1, size)
    ours = functional.calibration_error(
        torch.tensor(probabilities), torch.tensor(values), torch.tensor(weights), bins=10
    )
    return _difference(ours, calibration_error(probabilities, values, weights, bins=10))


def _measure_auc(generator: np.random.Generator, size: int) -> float:
    scores = generator.integers(0, 5, size).astype(np.float64)  # with ties
    positive = np.arange(size) % 2 == 0
    ours = functional.auc(torch.tensor(scores), torch.tensor(positive))
    return float("nan") if ours is None else _difference(ours, auc(scores, positive))


def _measure_running_baseline(generator: np.random.Generator, size: int) -> float:
    rewards, baseline, decay = generator.normal(size=size), float(generator.normal()), 0.7
    advantages_B, new_baseline = functional.running_baseline(torch.tensor(rewards), baseline, decay)
    expected = baseline + (1 - decay) * float(np.mean(rewards - baseline))
    return max(_difference(advantages_B, rewards - baseline), _difference(new_baseline, expected))


def _measure_discounted_turn_returns(generator: np.random.Generator, size: int) -> float:
    rewards = generator.normal(size=size)
    slots = generator.permutation(4 * size)[:size]
    conversations, turns = slots % 3, slots // 3
    ours = functional.discounted_turn_returns(
        torch.tensor(rewards), torch.tensor(conversations), torch.tensor(turns), 0.9
    )
    return _difference(ours, discounted_turn_returns(rewards, conversations, turns, 0.9))


def _measure_anchor_state_advantage(generator: np.random.Generator, size: int) -> float:
    returns, states = generator.normal(size=size), generator.integers(0, max(2, size // 2), size=size)
    ours = functional.anchor_state_advantage(torch.tensor(returns), torch.tensor(states))
    return _difference(ours, anchor_state_advantage(returns, states))


def _measure_turn_gae_advantage(generator: np.random.Generator, size: int) -> float:
    rewards, returns, values = generator.normal(size=(3, size))
    parents = np.array([generator.integers(-1, row) if row else -1 for row in range(size)])
    order = generator.permutation(size)  # rows are in no order
    place = np.argsort(order)
    shuffled = np.array([-1 if parents[row] < 0 else place[parents[row]] for row in order])
    ours = functional.turn_gae_advantage(
        torch.tensor(rewards), torch.tensor(returns), torch.tensor(values), torch.tensor(shuffled), 0.9, 0.8
    )
    return _difference(ours.advantages_B, turn_gae_advantage(rewards, returns, values, shuffled, 0.9, 0.8))


def _measure_distribution_kl(generator: np.random.Generator, size: int) -> float:
    old, new = generator.dirichlet(np.ones(size + 2), 8), generator.dirichlet(np.ones(size + 2), 8)
    log_probs = (torch.tensor(np.log(probabilities[:, :size])) for probabilities in (old, new))
    return _difference(functional.distribution_kl(*log_probs), distribution_kl(old, new, size))


MEASURES: dict[str, Callable[[np.random.Generator, int], float]] = {
    "binary_feedback_loss": _measure_binary_feedback_loss,
    "fit_platt_scaling": _measure_platt_scaling,
    "calibration_error": _measure_calibration_error,
    "auc": _measure_auc,
    "running_baseline": _measure_running_baseline,
    "discounted_turn_returns": _measure_discounted_turn_returns,
    "anchor_state_advantage": _measure_anchor_state_advantage,
    "turn_gae_advantage": _measure_turn_gae_advantage,
    "distribution_kl": _measure_distribution_kl,
}
