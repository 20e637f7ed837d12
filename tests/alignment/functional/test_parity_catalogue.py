"""What `make parity` demands and needs no peer for: every formula is compared or has a reason, and references agree."""

from tests.parity.catalogue import uncompared
from tests.parity.references import compare_with_references


def test_every_formula_is_compared_with_a_peer_or_has_a_reason() -> None:
    assert uncompared() == []


def test_formulas_that_no_peer_has_agree_with_their_references() -> None:
    comparisons = list(compare_with_references(seed=0, repeats=1))
    assert [row for row in comparisons if not row.is_within_bound] == []
