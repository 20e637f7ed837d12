"""How often automated rewards agree in sign with people's feedback."""

from collections.abc import Iterable
from dataclasses import dataclass

from alignment.tolerance import exceeds, sign


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
        if not self.total:
            return None
        classes = [(self.ups_right, self.ups), (self.downs_right, self.downs)]
        rates = [right / count for right, count in classes if count]
        mean = sum(rates) / len(rates) * (self.ups + self.downs) if rates else 0.0
        return (mean + self.pairs_right) / self.total


def weight_from_agreement(rate: float) -> float:
    """Return the weight of a source that agrees with people at this rate: 0 at chance (0.5), 1 if it always agrees."""
    return max(0.0, 2 * rate - 1)
