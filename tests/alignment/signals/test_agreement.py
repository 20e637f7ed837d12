"""Agreement of automated rewards with people."""

import pytest

from alignment.signals.agreement import Agreement


def test_positive_and_negative_feedback_have_equal_weight() -> None:
    always_positive = Agreement.count([(1.0, 0.9)] * 90 + [(-1.0, 0.9)] * 10)
    assert always_positive.rate == 0.5, "a constant prediction has an agreement of one half"
    assert Agreement.count([(1.0, 0.2), (-0.5, -0.1)]).rate == 1.0


def test_pairs_and_labels_are_weighted_by_their_counts() -> None:
    agreement = Agreement.count([(1.0, 1.0), (-1.0, 1.0)], [0.5, 0.1, -0.2, 0.0])
    assert agreement.rate == pytest.approx((0.5 * 2 + 0.5 * 4) / 6)


def test_neutral_feedback_is_skipped_and_no_feedback_has_no_rate() -> None:
    assert Agreement.count([(0.0, 1.0)]) == Agreement()
    assert (Agreement().rate, Agreement().total) == (None, 0)
