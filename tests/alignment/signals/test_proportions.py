"""Intervals of shares and of their differences, against published figures and figures computed by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignment.signals.proportions import Share, newcombe_difference, wilson_interval


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    [
        (
            81,
            263,
            0.2553,
            0.3662,
        ),  # Newcombe (1998), "Two-sided confidence intervals for the single proportion", table I
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (20, 20, 0.8389, 1.0),
    ],
)
def test_wilson_interval_equals_published_figures(successes: int, count: int, low: float, high: float) -> None:
    assert wilson_interval(successes, count) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(
    ("one", "other", "value", "low", "high"),
    [
        (Share(56, 70), Share(48, 80), 0.2, 0.0524, 0.3339),  # Newcombe (1998), method 10, table II
        (Share(9, 10), Share(3, 10), 0.6, 0.1705, 0.8090),
        (Share(6, 7), Share(2, 7), 0.5714, 0.0582, 0.8062),
        (Share(5, 56), Share(0, 29), 0.0893, -0.0381, 0.1926),
        (Share(0, 10), Share(0, 20), 0.0, -0.1611, 0.2775),
        (Share(10, 10), Share(0, 10), 1.0, 0.6075, 1.0),
    ],
)
def test_difference_equals_published_figures(one: Share, other: Share, value: float, low: float, high: float) -> None:
    difference = newcombe_difference(one, other)
    assert difference is not None
    assert tuple(difference) == pytest.approx((value, low, high), abs=6e-5)


def test_verdict_needs_an_interval_without_zero() -> None:
    better, unclear = newcombe_difference(Share(56, 70), Share(48, 80)), newcombe_difference(Share(5, 56), Share(0, 29))
    worse = newcombe_difference(Share(48, 80), Share(56, 70))
    assert better and worse and unclear
    assert (better.verdict, worse.verdict, unclear.verdict) == ("better", "worse", "no difference shown")


def test_without_trials_there_is_nothing_to_compare() -> None:
    assert Share(0, 0).rate is None and Share(0, 0).interval() is None
    assert newcombe_difference(Share(0, 0), Share(1, 2)) is None
    assert newcombe_difference(Share(1, 2), Share(0, 0)) is None
    for successes, count in ((0, 0), (3, 2), (-1, 2)):
        with pytest.raises(ValueError, match="impossible counts"):
            wilson_interval(successes, count)


@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 200), st.integers(0, 200))
def test_swapping_the_sides_mirrors_the_difference(up: int, down: int, other_up: int, other_down: int) -> None:
    one, other = Share(up, up + down), Share(other_up, other_up + other_down)
    there, back = newcombe_difference(one, other), newcombe_difference(other, one)
    if one.trials == 0 or other.trials == 0:
        assert there is None and back is None
        return
    assert there is not None and back is not None
    assert there.value == -back.value
    assert math.isclose(there.low, -back.high, abs_tol=1e-12) and math.isclose(there.high, -back.low, abs_tol=1e-12)
    assert -1 - 1e-12 <= there.low <= there.value <= there.high <= 1 + 1e-12
