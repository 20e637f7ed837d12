"""Rater trust without a database: what `workers/feedback/rater_trust.py` computes in SQL."""

import math

from alignment.signals.rater_trust import RaterCounts, decay_factor


def sample_quota(max_samples: int, weight: float) -> int:
    """Return how many samples a batch takes from one rater of the given weight, of at most `max_samples`.

    Example: sample_quota(4, 0.4) -> 1; sample_quota(4, 1.0) -> 4
    """
    return max(1, math.floor(max_samples * weight))


def decay_counts(recent: RaterCounts, page: RaterCounts) -> RaterCounts:
    """Return the recent counts of the crowd after one more page."""
    factor = decay_factor(page)
    return RaterCounts(recent.up * factor + page.up, recent.down * factor + page.down)
