"""Assertions on durations: an assert that compares an elapsed time, or a deadline, which a loaded machine misses.

The order of two times (`before <= row.created_at <= after`) is none. Values are followed through variables, attributes
and results of functions of the same file, as far as they are computed by arithmetic, `min`, `max` and the like.
"""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

CLOCKS = {f"time.{name}{unit}" for name in ("time", "monotonic", "perf_counter") for unit in ("", "_ns")}
CLOCKS |= {"loop.time", "asyncio.get_running_loop().time", "asyncio.get_event_loop().time"}
ARITHMETIC = {"abs", "float", "fmean", "int", "max", "mean", "median", "min", "round", "sorted", "sum"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Finding(NamedTuple):
    line: int
    text: str


@dataclass
class Names:
    """Names that hold, or as functions return, a time (`times`) or an elapsed time or deadline (`durations`)."""

    times: set[str] = field(default_factory=set)
    durations: set[str] = field(default_factory=set)

    def __or__(self, other: "Names") -> "Names":
        return Names(self.times | other.times, self.durations | other.durations)

    def is_time(self, node: ast.expr) -> bool:
        return _is_clock(node) or _name(node) in self.times or any(map(self.is_time, _parts(node)))

    def is_duration(self, node: ast.expr) -> bool:
        if _name(node) in self.durations:
            return True
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub) and self.is_time(node):
            return True
        return any(map(self.is_duration, _parts(node)))

    @property
    def size(self) -> int:
        return len(self.times) + len(self.durations)

    def learn(self, bindings: Iterable[tuple[str, ast.expr]]) -> None:
        """Add the names whose values are times or durations."""
        for name, value in bindings:
            if self.is_duration(value):
                self.durations.add(name)
            elif self.is_time(value):
                self.times.add(name)


def find_duration_asserts(path: Path) -> list[Finding]:
    """Return the asserts of a file that compare durations, except in tests that are marked slow."""
    tree = ast.parse(path.read_text())
    shared = _learn_shared(tree)
    found = []
    for function in _functions(tree):
        if not _is_slow(function):
            names = _learn_local(function, shared)
            asserts = (node for node in ast.walk(function) if isinstance(node, ast.Assert))
            found += [Finding(node.lineno, ast.unparse(node.test)) for node in asserts if _compares(node.test, names)]
    return [] if _is_slow(tree) else found


def _compares(test: ast.expr, names: Names) -> bool:
    comparisons = (part for part in ast.walk(test) if isinstance(part, ast.Compare))
    return any(names.is_duration(side) for part in comparisons for side in (part.left, *part.comparators))


def _learn_shared(tree: ast.Module) -> Names:
    """Return the variables of the module, and its attributes and functions, that hold or return times."""
    shared, size = Names(), -1
    while shared.size > size:  # a function may call one that comes later
        size = shared.size
        shared.learn(_bindings(node for node in tree.body if not isinstance(node, Function | ast.ClassDef)))
        for function in _functions(tree):
            local = _learn_local(function, shared)
            local.learn((f"{function.name}()", value) for value in _results(function))
            shared.times |= set(filter(_is_shared, local.times))
            shared.durations |= set(filter(_is_shared, local.durations))
    return shared


def _learn_local(function: Function, shared: Names) -> Names:
    """Return the shared names, and those of a function and the functions in it."""
    names, bindings, size = shared | Names(), list(_bindings([function])), -1
    while names.size > size:
        size = names.size
        names.learn(bindings)
    return names


def _is_shared(name: str) -> bool:
    return name.startswith(".") or name.endswith("()")


def _functions(tree: ast.AST) -> Iterator[Function]:
    """Yield the functions of a module and the methods of its classes, but no functions in functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield node
        elif isinstance(node, ast.ClassDef) and not _is_slow(node):
            yield from _functions(node)


def _is_slow(node: ast.Module | ast.ClassDef | Function) -> bool:
    if not isinstance(node, ast.Module):
        return any(map(_is_slow_mark, node.decorator_list))
    values = [
        part.value for part in node.body if isinstance(part, ast.Assign) and _name(part.targets[0]) == "pytestmark"
    ]
    return any(_is_slow_mark(mark) for value in values for mark in getattr(value, "elts", [value]))


def _is_slow_mark(node: ast.expr) -> bool:
    """Whether it is the mark itself: a slow parameter leaves the test's other parameters fast."""
    return ast.unparse(node) == "pytest.mark.slow"


def _is_clock(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in CLOCKS


def _name(node: ast.expr) -> str | None:
    """Return `name`, `.attribute` or, of a call, `name()`."""
    if isinstance(node, ast.Await | ast.Starred):
        return _name(node.value)
    if isinstance(node, ast.Call):
        return f"{(_name(node.func) or '').removeprefix('.')}()"
    if isinstance(node, ast.Name):
        return node.id
    return f".{node.attr}" if isinstance(node, ast.Attribute) else None


def _parts(node: ast.expr) -> list[ast.expr]:
    """Return the operands that make an expression a time or a duration if they are one."""
    match node:
        case ast.BinOp():
            return [node.left, node.right]
        case ast.UnaryOp():
            return [node.operand]
        case ast.IfExp():
            return [node.body, node.orelse]
        case ast.BoolOp():
            return node.values
        case ast.Await() | ast.Starred() | ast.Subscript():
            return [node.value]
        case ast.List() | ast.Tuple() | ast.Set():
            return node.elts
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
            return [node.elt]
        case ast.Call() if (_name(node.func) or "").removeprefix(".") in ARITHMETIC:
            return node.args
    return []


def _results(function: Function) -> list[ast.expr]:
    """Return what a function returns or, as a generator or a context manager, yields."""
    results = (node for node in ast.walk(function) if isinstance(node, ast.Return | ast.Yield))
    return [node.value for node in results if node.value is not None]


def _bindings(trees: Iterable[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    """Yield every name with the values that it is given, or that are appended to it."""
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case ast.Assign():
                for target in node.targets:
                    yield from _pairs(target, node.value)
            case ast.AnnAssign(value=ast.expr() as value) | ast.NamedExpr(value=value) | ast.AugAssign(value=value):
                yield from _pairs(node.target, value)
            case ast.withitem(context_expr=value, optional_vars=ast.expr() as target):
                yield from _pairs(target, value)
            case ast.Call(func=ast.Attribute(value=target, attr="append"), args=[value]):
                yield from _pairs(target, value)


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for one, other in zip(target.elts, value.elts, strict=True):
            yield from _pairs(one, other)
    elif (name := _name(target)) is not None:
        yield name, value
