"""The caps on what one rater, conversation or cluster gives to a batch."""

import math

MIN_RATERS_FOR_EVEN_SHARE = 5


def max_samples(share: float, size: int) -> int:
    """Return how many samples of a batch of `size` one rater, conversation or cluster may have; at least one."""
    return max(1, int(share * size))


def even_share(size: int, raters: int) -> int:
    """Return a batch's size divided by the number of raters, rounded up; 1 where there are too few raters."""
    return math.ceil(size / raters) if raters >= MIN_RATERS_FOR_EVEN_SHARE else 1
