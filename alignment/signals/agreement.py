"""How often a machine's word and people's are of one sign, and how sure that is: arithmetic alone."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

SURE = 2.576  # normal quantile of a bound that holds in 199 of 200 looks


@dataclass(frozen=True)
class Agreement:
    """Right ones of so many: of thumbs up, of thumbs down, of pairs.

    Example: Agreement(ups=80, ups_right=72, downs=20, downs_right=10) agrees in 0.7: up and down count alike.
    """

    ups: int = 0
    ups_right: int = 0
    downs: int = 0
    downs_right: int = 0
    pairs: int = 0
    pairs_right: int = 0

    @classmethod
    def of(cls, thumbs: Iterable[tuple[float, float]], pairs: Iterable[float] = ()) -> "Agreement":
        """`thumbs`: what was said and what the machine says, each in [-1, 1]; `pairs`: the machine's margins by which
        the chosen reply leads. A word of 0 says nothing; a machine's 0 is wrong."""
        spoken = [(said > 0, said * told > 0) for said, told in thumbs if said]
        margins = list(pairs)
        return cls(
            sum(up for up, _ in spoken),
            sum(up and right for up, right in spoken),
            sum(not up for up, _ in spoken),
            sum(not up and right for up, right in spoken),
            len(margins),
            sum(margin > 0 for margin in margins),
        )

    @property
    def words(self) -> int:
        return self.ups + self.downs + self.pairs

    @property
    def share(self) -> float | None:
        """Pairs as they are; of thumbs the mean of both sides, for whoever says "up" to everything is right about
        most replies and knows nothing. None without words."""
        return self._mean(lambda right, count: right / count)

    @property
    def at_most(self) -> float | None:
        """An upper bound of the share, by Wilson's interval (1927) of each side."""
        return self._mean(wilson_upper)

    def _mean(self, figure: Callable[[int, int], float]) -> float | None:
        sides = [(self.ups_right, self.ups), (self.downs_right, self.downs)]
        told = [figure(right, count) for right, count in sides if count]
        thumbs, total = self.ups + self.downs, self.words
        if not total:
            return None
        mean = sum(told) / len(told) * thumbs if told else 0.0
        return (mean + (figure(self.pairs_right, self.pairs) * self.pairs if self.pairs else 0.0)) / total


def wilson_upper(right: int, count: int, z: float = SURE) -> float:
    """Example: wilson_upper(10, 30) is about 0.57"""
    share = right / count
    middle, spread = share + z * z / (2 * count), z * math.sqrt((share * (1 - share) + z * z / (4 * count)) / count)
    return (middle + spread) / (1 + z * z / count)
