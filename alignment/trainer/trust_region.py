"""The size of an update: what its optimizer steps changed is scaled until KL(old ‖ new policy) is near a target.

The line search of TRPO (Schulman et al., 2015, appendix C), along the displacement that the optimizer has made. KL
grows with the square of a small displacement and more slowly with that of a large one: from the second measurement on,
the exponent is estimated, so that two or three measurements suffice.

The learning rate is adapted too (`lr_factor`), so that the KL of the next update is about half the target. It is
adapted after an update that was not scaled as well: otherwise a rate that was once too large would go on making
updates of nearly the whole target, and one that was too small updates of 0.3 of it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_MEASUREMENTS = 6
MAX_FACTOR = 10.0  # one measurement changes the scale by at most this factor
MAX_SCALE = 100.0
MIN_EXPONENT, MAX_EXPONENT = 0.5, 2.0  # of KL as a power of the scale
AIM = 0.5  # share of the target that the search and the learning rate aim at
MAX_LR_FACTOR = 10.0  # one update changes the learning rate by at most this factor
MIN_LR_SHARE = 0.3  # a learning rate of which less than this share would fit is corrected at once
MIN_SHARE = 0.3  # an update with less than this share of the target is made larger


@dataclass(frozen=True)
class FittedStep:
    """The factor that an update was scaled with, its KL in nats per token, and how often KL was measured.

    Example: FittedStep(scale=0.4, kl=0.0083, measurements=2)
    """

    scale: float
    kl: float
    measurements: int

    def lr_factor(self, target: float) -> float:
        """Return what to multiply the learning rate with.

        The rate moves half of the way, in logarithms, to the one with which this update would have had the KL that is
        aimed at: so it is a running mean over the updates, of which one may be small or large by chance. A rate that is
        several times too large is corrected at once.
        """
        if self.kl <= 0:
            return MAX_LR_FACTOR
        factor: float = self.scale * (AIM * target / self.kl) ** 0.5
        return min(max(factor if factor < MIN_LR_SHARE else factor**0.5, 1 / MAX_LR_FACTOR), MAX_LR_FACTOR)


class TrustRegion:
    """Remembers the parameters before an update, and scales the update afterwards."""

    def __init__(self, parameters: Sequence[Tensor], target: float) -> None:
        """`parameters` are this rank's shards; `target` is the largest KL in nats per token."""
        self.parameters, self.target = parameters, target
        self.start = [parameter.detach().clone() for parameter in parameters]

    @torch.no_grad()
    def fit(self, measure_kl: Callable[[], float], *, may_enlarge: bool = True) -> FittedStep:
        """Scale the update so that its KL is at most the target and, if possible, not below 0.3 of it.

        Without `may_enlarge` the scale is at most 1.
        `measure_kl` returns the KL of the current parameters, equal on every rank; inf or NaN counts as too large. If
        no scale fits, the parameters are those of before the update, with a scale of 0.
        """
        end = [parameter.detach().clone() for parameter in self.parameters]
        scale, kl, exponent = 1.0, measure_kl(), MAX_EXPONENT
        fitting, smallest_too_large = FittedStep(0.0, 0.0, 0), math.inf
        measurements, max_scale = 1, MAX_SCALE if may_enlarge else 1.0
        while True:
            if kl <= self.target:
                fitting = FittedStep(scale, kl, measurements)
                if kl >= MIN_SHARE * self.target or scale >= smallest_too_large:
                    break
            else:
                smallest_too_large = min(scale, smallest_too_large)
            if measurements == MAX_MEASUREMENTS:
                break
            last_scale, last_kl = scale, kl
            scale = min(self._next_scale(scale, kl, exponent, fitting.scale, smallest_too_large), max_scale)
            if scale <= fitting.scale:
                break
            self._set(end, scale)
            kl = measure_kl()
            measurements += 1
            exponent = _estimate_exponent(scale / last_scale, kl, last_kl)
        if scale != fitting.scale:
            self._set(end, fitting.scale)
        return FittedStep(fitting.scale, fitting.kl, measurements)

    def _next_scale(self, scale: float, kl: float, exponent: float, lower: float, upper: float) -> float:
        """Return the scale to measure next: between `lower`, which fits, and `upper`, which is too large, if known."""
        factor = (AIM * self.target / kl) ** (1 / exponent) if 0 < kl < math.inf else (MAX_FACTOR if kl == 0 else 0.0)
        proposal = scale * min(MAX_FACTOR, max(1 / MAX_FACTOR, factor))
        if lower and upper < math.inf and not lower < proposal < 0.9 * upper:
            return math.sqrt(lower * upper)  # KL grows faster or more slowly there than any power that is expected
        return min(proposal, 0.9 * upper)

    def _set(self, end: Sequence[Tensor], scale: float) -> None:
        for parameter, before, after in zip(self.parameters, self.start, end, strict=True):
            parameter.copy_(torch.lerp(before, after, scale) if scale else before)


def _estimate_exponent(factor: float, kl: float, last_kl: float) -> float:
    """Return the power of the scale that KL grew with, when the scale changed by this factor."""
    if not (0 < kl < math.inf and 0 < last_kl < math.inf):
        return MAX_EXPONENT
    return min(MAX_EXPONENT, max(MIN_EXPONENT, math.log(kl / last_kl) / math.log(factor)))
