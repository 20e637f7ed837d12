"""The counts of `Any` that `make facts` prints."""

from tests.architecture.any_uses import AnyUses, count_any_uses, count_in_source

SOURCE = '''
import typing
from typing import Any  # an import is no use


def read(rows: list[dict[str, Any]], **values: Any) -> dict[str, int]:
    """Return Any."""
    kept: typing.Any = rows or dict[str, Any](values)
    return kept
'''


def test_uses_are_counted_and_imports_are_not() -> None:
    assert count_in_source(SOURCE) == AnyUses(any=4, dict_str_any=2, lines=9)
    assert count_in_source(SOURCE).per_thousand_lines == 444.4


def test_the_total_is_that_of_all_packages() -> None:
    counts = count_any_uses()
    total = counts.pop("total")
    assert sorted(counts) == ["alignment", "app", "workers"]
    assert total.lines == sum(count.lines for count in counts.values()) > 10_000
