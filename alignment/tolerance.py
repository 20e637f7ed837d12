"""Comparisons of rewards, scores and shares, in which values that are equal but for rounding are equal.

A reward is often a mean, such as (0.1 + 0.2 + 0.3) / 3, which is not the float 0.2. An exact comparison would prefer
one of two equal replies. Tensors and SQL expressions are compared with TOLERANCE itself.
"""

from collections.abc import Collection

# Above the rounding of float32 near 1 (1e-7), and below any difference of rewards that a source intends.
TOLERANCE = 1e-6


def exceeds(value: float, other: float, margin: float = 0.0) -> bool:
    """Return whether `value` is greater than `other` by more than `margin`, and not by rounding alone."""
    return value - other > margin + TOLERANCE


def is_tie(values: Collection[float]) -> bool:
    """Return whether all values are equal but for rounding. Fewer than two values are a tie."""
    return not values or not exceeds(max(values), min(values))


def sign(value: float) -> int:
    """Return 1 for a positive value, -1 for a negative one, and 0 for one that is 0 but for rounding."""
    return int(exceeds(value, 0.0)) - int(exceeds(0.0, value))


def snap_to_zero(value: float) -> float:
    """Return the value, or 0 if it is 0 but for rounding.

    Example: snap_to_zero(2 * (0.4 - 0.1) / (0.7 - 0.1) - 1) -> 0.0, the middle of a scale from 0.1 to 0.7
    """
    return value if sign(value) else 0.0
