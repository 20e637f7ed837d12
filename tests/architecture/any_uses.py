"""Uses of `Any`: the places at which mypy checks nothing."""

import ast
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from app.core.settings import REPOSITORY
from tests.architecture.source_tree import PACKAGES, find_modules


class AnyUses(NamedTuple):
    """Uses of `Any` in sources of so many lines, and how many of them are values of `dict[str, Any]`."""

    any: int
    dict_str_any: int
    lines: int

    @property
    def per_thousand_lines(self) -> float:
        return round(1000 * self.any / max(1, self.lines), 1)

    def as_json(self) -> dict[str, float]:
        return {**self._asdict(), "any_per_thousand_lines": self.per_thousand_lines}


def count_in_source(source: str) -> AnyUses:
    """Count in one source. Imports are no uses, and neither is the word in a comment or a string."""
    nodes = list(ast.walk(ast.parse(source)))
    num_dicts = sum(
        isinstance(node, ast.Subscript) and ast.unparse(node) in ("dict[str, Any]", "dict[str, typing.Any]")
        for node in nodes
    )
    return AnyUses(sum(map(_is_any, nodes)), num_dicts, len(source.splitlines()))


def count_any_uses(root: Path = REPOSITORY) -> dict[str, AnyUses]:
    """Return the uses in each of the service's packages, and in all of them as `total`."""
    by_package = {
        package: _add(count_in_source(module.source) for module in find_modules(package, root=root))
        for package in PACKAGES
    }
    return by_package | {"total": _add(by_package.values())}


def _is_any(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr == "Any" and isinstance(node.value, ast.Name) and node.value.id == "typing"
    return isinstance(node, ast.Name) and node.id == "Any"


def _add(counts: Iterable[AnyUses]) -> AnyUses:
    return AnyUses(*(sum(column) for column in zip(*counts, strict=True)))
