"""Formulas that no other library has, against independent references in float64 NumPy."""

import pytest

from tests.parity.catalogue import NO_PEER
from tests.parity.references import MEASURES, Comparison, compare_with_references


@pytest.mark.parametrize(
    "comparison", compare_with_references(seed=20261121), ids=lambda comparison: comparison.function
)
def test_implementation_equals_the_reference(comparison: Comparison) -> None:
    assert comparison.is_within_bound, comparison


def test_every_function_without_a_peer_is_listed() -> None:
    assert set(MEASURES) <= set(NO_PEER)
