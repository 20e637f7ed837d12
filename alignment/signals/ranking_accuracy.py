"""How well scores order replies as people do, with confidence bounds: the evidence that a reward model is judged by.

The figure is the probability that a liked reply scores higher than a disliked one (the area under the ROC curve, AUC),
or that the chosen reply of a pair does. 0.5 is chance, whatever the share of likes. Scores of different models are not
comparable, so the AUC of each is computed alone, and they are averaged by the inverse of their variance at chance.

The bounds invert the score test, as Wilson's interval does for a share: a value is within them if the difference from
it is at most `z` standard deviations, computed at that value. So the bounds after few votes are wide even where all of
them are right. Variance of the AUC: Hanley & McNeil (1982), "The meaning and use of the area under a receiver operating
characteristic (ROC) curve".
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from alignment.signals.proportions import Interval
from alignment.tolerance import TOLERANCE, sign

Z_SCORE = 1.6448536269514722  # normal quantile of a one-sided 95 % bound
NUM_BISECTIONS = 40


class RankStratum(NamedTuple):
    """The order of one model's scores: `ups` liked and `downs` disliked replies, or pairs (`downs` is 0).

    `auc` is the share of right orders. Example: RankStratum(ups=6, downs=4, auc=0.875)
    """

    ups: int
    downs: int
    auc: float

    def variance(self, auc: float) -> float:
        """Return the variance of the estimate if the true value is `auc`."""
        product = auc * (1 - auc)
        if not self.downs:
            return product / self.ups
        two_ups = auc / (2 - auc) - auc * auc  # two liked replies are above one disliked reply
        two_downs = 2 * auc * auc / (1 + auc) - auc * auc
        total = product + (self.ups - 1) * two_ups + (self.downs - 1) * two_downs
        return total / (self.ups * self.downs)


class RankEvidence(NamedTuple):
    """How well scores order replies as people do, over one or several models."""

    strata: tuple[RankStratum, ...] = ()

    @property
    def num_votes(self) -> int:
        """Return the number of votes and pairs."""
        return sum(stratum.ups + stratum.downs for stratum in self.strata)

    @property
    def auc(self) -> float | None:
        """Return the mean over the strata, weighted by their precision; None without evidence."""
        if not self.strata:
            return None
        return sum(weight * stratum.auc for weight, stratum in self._weighted()) / self._total_weight

    def bounds(self, z: float = Z_SCORE) -> Interval:
        """Return the one-sided lower and upper bound; 0 and 1 without evidence."""
        auc = self.auc
        if auc is None:
            return Interval(0.0, 1.0)
        return Interval(self._find_bound(auc, 0.0, z), self._find_bound(auc, 1.0, z))

    def _weighted(self) -> list[tuple[float, RankStratum]]:
        return [(1 / stratum.variance(0.5), stratum) for stratum in self.strata]

    @property
    def _total_weight(self) -> float:
        return sum(weight for weight, _ in self._weighted())

    def _find_bound(self, auc: float, extreme: float, z: float) -> float:
        """Return the value between the estimate and an extreme from which the estimate is z deviations away."""
        inside, outside = auc, extreme
        for _ in range(NUM_BISECTIONS):
            middle = (inside + outside) / 2
            variance = sum(
                (weight / self._total_weight) ** 2 * one.variance(middle) for weight, one in self._weighted()
            )
            if abs(auc - middle) <= z * math.sqrt(variance):
                inside = middle
            else:
                outside = middle
        return inside


def rank_votes(votes: Iterable[tuple[float, float]]) -> list[RankStratum]:
    """Return the stratum of (vote, score) of one model; none where one class is missing. Votes of 0 are skipped."""
    rated = [(sign(vote), score) for vote, score in votes]
    approved = [score for vote, score in rated if vote > 0]
    disapproved = sorted(score for vote, score in rated if vote < 0)
    if not approved or not disapproved:
        return []
    half_wins = sum(_half_wins(score, disapproved) for score in approved)
    return [RankStratum(len(approved), len(disapproved), half_wins / (2 * len(approved) * len(disapproved)))]


def rank_pairs(margins: Iterable[float]) -> list[RankStratum]:
    """Return the stratum of pairs, by the scores of the chosen replies minus those of the rejected ones."""
    signs = [sign(margin) for margin in margins]
    return [RankStratum(len(signs), 0, sum((one + 1) / 2 for one in signs) / len(signs))] if signs else []


def _half_wins(score: float, disapproved: Sequence[float]) -> int:
    """Return twice the number of smaller scores, with ties within TOLERANCE counted half."""
    return bisect_left(disapproved, score - TOLERANCE) + bisect_right(disapproved, score + TOLERANCE)
