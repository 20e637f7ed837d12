"""How often automated rewards agree in sign with people's feedback, with a confidence bound."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from alignment.signals.proportions import wilson_interval
from alignment.tolerance import exceeds, sign

Z_SCORE = 2.576  # normal quantile of a one-sided 99.5 % bound


@dataclass(frozen=True)
class Agreement:
    """Counts of correct automated rewards: on positive feedback, on negative feedback, on pairs.

    Example: Agreement(ups=80, ups_right=72, downs=20, downs_right=10).rate is 0.7: both classes have equal weight.
    """

    ups: int = 0
    ups_right: int = 0
    downs: int = 0
    downs_right: int = 0
    pairs: int = 0
    pairs_right: int = 0

    @classmethod
    def count(cls, labels: Iterable[tuple[float, float]], pairs: Iterable[float] = ()) -> "Agreement":
        """Count agreements.

        `labels` are (feedback, automated reward), each in [-1, 1]; `pairs` are the margins by which the automated
        reward of the chosen reply exceeds that of the rejected one. Feedback of 0 is skipped; a reward of 0 is wrong.
        """
        results = [
            (sign(feedback) > 0, sign(feedback) == sign(reward)) for feedback, reward in labels if sign(feedback)
        ]
        margins = list(pairs)
        return cls(
            sum(up for up, _ in results),
            sum(up and right for up, right in results),
            sum(not up for up, _ in results),
            sum(not up and right for up, right in results),
            len(margins),
            sum(exceeds(margin, 0.0) for margin in margins),
        )

    @property
    def total(self) -> int:
        return self.ups + self.downs + self.pairs

    @property
    def rate(self) -> float | None:
        """Return the rate of agreement, None without feedback.

        Labels contribute their balanced accuracy, because a source that says "up" to everything is right about most
        replies. Pairs contribute their accuracy.
        """
        return self._mean(lambda right, count: right / count)

    @property
    def upper_bound(self) -> float | None:
        """Return an upper bound of the rate, by Wilson's interval (1927) of each class."""
        return self._mean(wilson_upper)

    def _mean(self, estimate: Callable[[int, int], float]) -> float | None:
        classes = [(self.ups_right, self.ups), (self.downs_right, self.downs)]
        rates = [estimate(right, count) for right, count in classes if count]
        labels, total = self.ups + self.downs, self.total
        if not total:
            return None
        mean = sum(rates) / len(rates) * labels if rates else 0.0
        return (mean + (estimate(self.pairs_right, self.pairs) * self.pairs if self.pairs else 0.0)) / total


def wilson_upper(right: int, count: int, z: float = Z_SCORE) -> float:
    """Return the upper end of Wilson's interval. Example: wilson_upper(10, 30) is about 0.57"""
    return wilson_interval(right, count, z).high


def weight_from_agreement(rate: float) -> float:
    """Return the weight of a source that agrees with people at this rate: 0 at chance (0.5), 1 if it always agrees."""
    return max(0.0, 2 * rate - 1)
