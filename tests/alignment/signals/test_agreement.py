"""Agreement with people, and how sure it is."""

import pytest

from alignment.signals.agreement import Agreement, wilson_upper


def test_up_and_down_count_alike() -> None:
    flattering = Agreement.of([(1.0, 0.9)] * 90 + [(-1.0, 0.9)] * 10)
    assert flattering.share == 0.5, "who says up to everything knows nothing"
    assert Agreement.of([(1.0, 0.2), (-0.5, -0.1)]).share == 1.0


def test_pairs_count_beside_thumbs_by_their_number() -> None:
    counted = Agreement.of([(1.0, 1.0), (-1.0, 1.0)], [0.5, 0.1, -0.2, 0.0])
    assert counted.share == pytest.approx((0.5 * 2 + 0.5 * 4) / 6)


def test_a_word_of_nothing_is_no_word_and_no_words_are_no_share() -> None:
    assert Agreement.of([(0.0, 1.0)]) == Agreement()
    assert (Agreement().share, Agreement().at_most, Agreement().words) == (None, None, 0)


def test_the_bound_is_wilsons_and_narrows_with_words() -> None:
    # z = 1.96, 10 of 30: (1/3 + z²/60 + z·sqrt((2/9 + z²/120)/30)) / (1 + z²/30)
    assert wilson_upper(10, 30, 1.96) == pytest.approx(0.5122, abs=1e-3)
    assert wilson_upper(3, 3) == pytest.approx(1.0)
    few = Agreement.of([(1.0, -1.0)] * 5 + [(-1.0, -1.0)] * 5).at_most
    many = Agreement.of([(1.0, -1.0)] * 50 + [(-1.0, -1.0)] * 50).at_most
    assert few is not None and many is not None and 0.5 < many < few < 1.0
