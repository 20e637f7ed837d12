"""Shares of successes with confidence intervals: of one share, and of the difference of two.

Both intervals are meant for independent trials whose number does not depend on their results. Sources: Wilson (1927),
"Probable inference, the law of succession, and statistical inference"; Newcombe (1998), "Interval estimation for the
difference between independent proportions", method 10.
"""

import math
from typing import Literal, NamedTuple

Z_95 = 1.959963984540054  # normal quantile of a two-sided 95 % interval

Verdict = Literal["better", "worse", "no difference shown"]


class Interval(NamedTuple):
    low: float
    high: float


class Share(NamedTuple):
    """A number of successes of a number of trials.

    Example: Share(10, 20).interval() is about (0.299, 0.701)
    """

    successes: int
    trials: int

    @property
    def rate(self) -> float | None:
        """Return the share of successes; None without trials."""
        return self.successes / self.trials if self.trials else None

    def interval(self, z: float = Z_95) -> Interval | None:
        """Return Wilson's interval, which lies within [0, 1]; None without trials."""
        return wilson_interval(self.successes, self.trials, z) if self.trials else None


class Difference(NamedTuple):
    """By how much one share exceeds another, with its interval."""

    value: float
    low: float
    high: float

    @property
    def verdict(self) -> Verdict:
        """Return "better" or "worse" where the interval leaves out 0."""
        if self.low > 0:
            return "better"
        return "worse" if self.high < 0 else "no difference shown"


def wilson_interval(successes: int, count: int, z: float = Z_95) -> Interval:
    """Return Wilson's score interval of a share, at a normal quantile `z`.

    Raises ValueError for impossible counts. Example: wilson_interval(10, 20) is about (0.299, 0.701)
    """
    if not 0 <= successes <= count or count == 0:
        raise ValueError(f"impossible counts: {successes} of {count}")
    rate, square = successes / count, z * z / count
    centre = rate + square / 2
    width = z * math.sqrt((rate * (1 - rate) + square / 4) / count)
    # Without failures the upper end is 1, and without successes the lower one 0: rounding must not miss them.
    low = 0.0 if successes == 0 else (centre - width) / (1 + square)
    high = 1.0 if successes == count else (centre + width) / (1 + square)
    return Interval(low, high)


def newcombe_difference(one: Share, other: Share, z: float = Z_95) -> Difference | None:
    """Return `one.rate - other.rate` with Newcombe's hybrid score interval; None where one has no trials.

    Example: newcombe_difference(Share(56, 70), Share(48, 80)) is 0.2, from 0.0524 to 0.3339
    """
    if not (one.trials and other.trials):
        return None
    rate, other_rate = one.successes / one.trials, other.successes / other.trials
    (low, high), (other_low, other_high) = wilson_interval(*one, z), wilson_interval(*other, z)
    below = math.hypot(rate - low, other_high - other_rate)
    above = math.hypot(high - rate, other_rate - other_low)
    return Difference(rate - other_rate, rate - other_rate - below, rate - other_rate + above)
