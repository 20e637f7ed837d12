"""Agreement of automated rewards with people, and its confidence bound."""

import pytest

from alignment.signals.agreement import Agreement, wilson_upper


def test_positive_and_negative_feedback_have_equal_weight() -> None:
    always_positive = Agreement.count([(1.0, 0.9)] * 90 + [(-1.0, 0.9)] * 10)
    assert always_positive.rate == 0.5, "a constant prediction has an agreement of one half"
    assert Agreement.count([(1.0, 0.2), (-0.5, -0.1)]).rate == 1.0


def test_pairs_and_labels_are_weighted_by_their_counts() -> None:
    agreement = Agreement.count([(1.0, 1.0), (-1.0, 1.0)], [0.5, 0.1, -0.2, 0.0])
    assert agreement.rate == pytest.approx((0.5 * 2 + 0.5 * 4) / 6)


def test_neutral_feedback_is_skipped_and_no_feedback_has_no_rate() -> None:
    assert Agreement.count([(0.0, 1.0)]) == Agreement()
    assert (Agreement().rate, Agreement().upper_bound, Agreement().total) == (None, None, 0)


def test_upper_bound_is_wilsons_and_narrows_with_more_feedback() -> None:
    # z = 1.96, 10 of 30: (1/3 + z²/60 + z·sqrt((2/9 + z²/120)/30)) / (1 + z²/30)
    assert wilson_upper(10, 30, 1.96) == pytest.approx(0.5122, abs=1e-3)
    assert wilson_upper(3, 3) == pytest.approx(1.0)
    few = Agreement.count([(1.0, -1.0)] * 5 + [(-1.0, -1.0)] * 5).upper_bound
    many = Agreement.count([(1.0, -1.0)] * 50 + [(-1.0, -1.0)] * 50).upper_bound
    assert few is not None and many is not None and 0.5 < many < few < 1.0
