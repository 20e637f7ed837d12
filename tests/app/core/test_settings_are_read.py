"""Every setting is read by the program: none is accepted and then ignored."""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import pytest
from pydantic import BaseModel

from app.core.settings import REPOSITORY, Settings
from app.core.settings.tree import find, leaves, models

SOURCES = ("app", "workers", "alignment", "demo")


class Reads(ast.NodeVisitor):
    """The attributes that a module reads, each with what its owner is called.

    The owner of `settings.server.port` is `server`. The owner of `port` of a variable is whatever the variable is bound
    from: the attributes and the types of the assigned expression, or its annotation; of `self`, the class.

    Args:
        returned: The types that functions return, by the functions' names.
    """

    def __init__(self, returned: Mapping[str, set[str]]) -> None:
        self._returned = returned
        self.reads: set[tuple[str, str]] = set()
        self._by_variable: dict[str, set[str]] = defaultdict(set)
        self._of_variables: set[tuple[str, str]] = set()
        self._class = ""

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before, self._class = self._class, node.name
        self.generic_visit(node)
        self._class = before

    def visit_arg(self, node: ast.arg) -> None:
        if node.annotation is not None:
            self._by_variable[node.arg] |= set(_names(node.annotation))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if isinstance(node.target, ast.Name):
            self._by_variable[node.target.id] |= set(_names(node.annotation))
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=True))
            for name, value in pairs:
                self._bind(name, value)
        self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._bind(node.target, node.value)
        self.generic_visit(node)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            names = set(_names(value))
            self._by_variable[target.id] |= names.union(*(self._returned.get(name, set()) for name in names))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Attribute):
            self.reads.add((node.value.attr, node.attr))
            self._of_variables.add((node.value.attr, node.attr))
        elif isinstance(node.value, ast.Call):
            for name in _names(node.value.func):
                self.reads |= {(owner, node.attr) for owner in self._returned.get(name, set())}
        elif isinstance(node.value, ast.Name):
            self.reads.add((self._class if node.value.id == "self" else node.value.id, node.attr))
            self._of_variables.add((node.value.id, node.attr))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """`config.model_dump(include={"eps"})` reads `eps` of `config`."""
        if isinstance(node.func, ast.Attribute) and node.func.attr == "model_dump":
            constants = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
            names = {name for name in constants if isinstance(name, str)}
            self._of_variables |= {(owner, name) for owner in _names(node.func.value) for name in names}
        self.generic_visit(node)

    def all_reads(self) -> set[tuple[str, str]]:
        return self.reads | {
            (owner, name) for variable, name in self._of_variables for owner in self._by_variable[variable]
        }


def _names(value: ast.expr) -> Iterator[str]:
    for part in ast.walk(value):
        if isinstance(part, ast.Attribute):
            yield part.attr
        elif isinstance(part, ast.Name):
            yield part.id


@cache
def all_reads() -> set[tuple[str, str]]:
    paths = [path for folder in SOURCES for path in sorted((REPOSITORY / folder).rglob("*.py"))]
    modules = [ast.parse(path.read_text()) for path in paths]
    returned: dict[str, set[str]] = defaultdict(set)
    for node in (node for module in modules for node in ast.walk(module)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.returns is not None:
            returned[node.name] |= set(_names(node.returns))
    found: set[tuple[str, str]] = set()
    for module in modules:
        visitor = Reads(returned)
        visitor.visit(module)
        found |= visitor.all_reads()
    return found


def owners(section: str) -> set[str]:
    """Return the names by which code knows a section: its last part, its class and its base classes."""
    annotation: Any = find(Settings, tuple(section.split("."))) if section else Settings
    kinds = [base for kind in models(annotation) for base in kind.__mro__ if issubclass(base, BaseModel)]
    return {section.rpartition(".")[2] or "settings", *(kind.__name__ for kind in kinds)} - {"BaseModel", "Frozen"}


@pytest.mark.parametrize("path", [leaf.path for leaf in leaves(Settings)])
def test_setting_is_read(path: str) -> None:
    section, _, name = path.rpartition(".")
    assert any((owner, name) in all_reads() for owner in owners(section)), f"nothing reads {path}"


def test_a_setting_that_nothing_reads_is_found() -> None:
    visitor = Reads({})
    visitor.visit(ast.parse("def f(settings: Settings):\n    server, x = settings.server, 1\n    return server.port"))
    assert {("server", "port"), ("settings", "server")} <= visitor.all_reads()
    assert ("server", "host") not in visitor.all_reads() and ("ServerSettings", "unread") not in all_reads()
