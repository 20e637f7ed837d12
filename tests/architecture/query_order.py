"""Queries whose rows have no order, although their order matters: a `select` without ORDER BY that becomes a list.

A database promises no order without ORDER BY, and none among the rows that are equal in all columns of it. So the order
is complete if its columns, and those that `where` sets equal to one value, determine the rows of all selected tables by
their keys (primary key, unique constraint) and the equalities of joins, or if they contain the columns of GROUP BY.

The queries of one module are followed through variables and functions. What counts as a list: `list`, `tuple`, `all()`,
`first()`, a list comprehension, a loop, what a function returns, and `limit`. A set, a dict, `sorted`, `one()` and
figures such as `len` and `sum` have no order. Textual SQL is not read.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import Index, Table, UniqueConstraint

from app.models import Base

EXECUTE = {"scalars", "execute", "stream", "stream_scalars"}
ROOTS = {"select", "union", "union_all"}
NESTED = {"subquery", "exists", "cte", "scalar_subquery"}
SAME_ROWS = {"all", "tuples", "mappings", "scalars", "unique", "fetchall", "partitions", "columns"}
LISTS = {"list", "tuple", "enumerate", "zip", "map", "filter", "chain", "groupby", "extend"}
Function = ast.FunctionDef | ast.AsyncFunctionDef
Use = str | None  # what rows become whose order matters; None if it does not matter


@cache
def model_keys() -> dict[str, list[set[str]]]:
    """Return, by the name of the model, the sets of columns of which no two rows have the same values."""
    keys = {}
    for mapper in Base.registry.mappers:
        table = mapper.local_table
        assert isinstance(table, Table)
        names = {column: mapper.get_property_by_column(column).key for column in table.columns}
        uniques = [list(part.columns) for part in table.constraints if isinstance(part, UniqueConstraint)]
        uniques += [list(index.columns) for index in table.indexes if _is_key(index)]
        keys[mapper.class_.__name__] = [
            {names[column] for column in columns} for columns in ([*table.primary_key.columns], *uniques)
        ]
    return keys


def _is_key(index: Index) -> bool:
    """Whether it is unique for all rows, or for all that have a value: rows without one are read by no list."""
    condition = index.dialect_options["sqlite"]["where"]
    return index.unique and (condition is None or str(condition) == f"{list(index.columns)[-1].name} IS NOT NULL")


class Finding(NamedTuple):
    line: int
    function: str
    query: str
    use: str


@dataclass
class Query:
    """The parts of a `select` that decide about the order of its rows."""

    text: str = ""
    entities: list[ast.expr] = field(default_factory=list)
    order: list[ast.expr] = field(default_factory=list)
    conditions: list[ast.expr] = field(default_factory=list)
    groups: list[ast.expr] = field(default_factory=list)
    has_limit: bool = False

    def add(self, method: str, arguments: list[ast.expr]) -> None:
        if method == "order_by":
            self.order += arguments
        elif method in ("where", "filter", "filter_by", "join", "outerjoin"):
            self.conditions += arguments
        elif method == "group_by":
            self.groups += arguments
        elif method == "limit":
            self.has_limit = True

    def merge(self, other: "Query") -> None:
        for name in ("entities", "order", "conditions", "groups"):
            getattr(self, name).extend(getattr(other, name))
        self.text = self.text or other.text
        self.has_limit |= other.has_limit

    @property
    def is_one_row(self) -> bool:
        """Whether it has aggregates only, and no groups."""
        functions = [ast.unparse(entity).startswith(("func.", "exists(")) for entity in self.entities]
        return bool(functions) and all(functions) and not self.groups

    def is_ordered(self, keys: dict[str, list[set[str]]]) -> bool:
        if any(isinstance(part, ast.Starred) for part in self.order):
            return True  # the columns of `creation_order`, or those of GROUP BY
        ordered = {_strip(part) for part in self.order}
        if self.groups:
            return {ast.unparse(part) for part in self.groups} <= ordered
        selected = {name.partition(".")[0] for entity in self.entities for name in _columns(entity)} & keys.keys()
        determined = self._determined(ordered, keys)
        if selected:
            return bool(ordered) and selected <= determined
        models = {name.partition(".")[0] for name in ordered}  # the selected columns are those of another module
        unknown = {name.rpartition(".")[2] for name in ordered if name.partition(".")[0] not in keys}
        return bool(models & determined or unknown & {"id", "seq", "turn_id"})

    def _determined(self, ordered: set[str], keys: dict[str, list[set[str]]]) -> set[str]:
        """Return the models of which one row belongs to given values of the columns in ORDER BY."""
        pairs = [pair for condition in self.conditions for pair in _equalities(condition)]
        fixed, models, size = set(ordered), set[str](), -1
        while len(fixed) + len(models) > size:
            size = len(fixed) + len(models)
            for one, other in [*pairs, *((other, one) for one, other in pairs)]:
                model = other.partition(".")[0]
                if model not in keys or other in fixed or model in models:
                    fixed.add(one)
            models |= {
                model for model in keys for key in keys[model] if {f"{model}.{column}" for column in key} <= fixed
            }
        return models


def _strip(node: ast.expr) -> str:
    while (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr
        in (
            "desc",
            "asc",
            "nulls_last",
            "nulls_first",
        )
    ):
        node = node.func.value
    return ast.unparse(node)


def _columns(entity: ast.expr) -> Iterator[str]:
    """Yield the models and columns in a selected expression."""
    if ast.unparse(entity).startswith("exists("):
        return
    if isinstance(entity, ast.Name):
        yield entity.id
    yield from (ast.unparse(part) for part in ast.walk(entity) if isinstance(part, ast.Attribute))


def _equalities(condition: ast.expr) -> Iterator[tuple[str, str]]:
    """Yield the two sides of each equality that must hold; those of an `or_` are left out."""
    if isinstance(condition, ast.Call) and ast.unparse(condition.func) == "and_":
        for part in condition.args:
            yield from _equalities(part)
    elif isinstance(condition, ast.BinOp) and isinstance(condition.op, ast.BitAnd):
        yield from _equalities(condition.left)
        yield from _equalities(condition.right)
    elif isinstance(condition, ast.Compare) and len(condition.ops) == 1 and isinstance(condition.ops[0], ast.Eq):
        yield ast.unparse(condition.left), ast.unparse(condition.comparators[0])


@dataclass
class Source:
    """One module, with the parents of its nodes."""

    tree: ast.Module

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    @cached_property
    def functions(self) -> dict[str, Function]:
        return {node.name: node for node in ast.walk(self.tree) if isinstance(node, Function)}

    def scope(self, node: ast.AST) -> Function | ast.Module:
        """Return the outermost function that a node is in."""
        found: Function | ast.Module = self.tree
        while node in self.parents:
            node = self.parents[node]
            if isinstance(node, Function):
                found = node
        return found

    def values(self, name: str, scope: ast.AST) -> list[ast.expr]:
        """Return all values that a variable is given in a function, or in the module."""
        return [
            node.value
            for node in ast.walk(scope)
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr)
            and node.value is not None
            and any(
                isinstance(target, ast.Name) and target.id == name
                for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            )
        ]

    def query(self, node: ast.expr, seen: frozenset[str] = frozenset()) -> Query | None:
        """Return the query that an expression is, if it is known to be one.

        Of `query = query.where(…)` it has the parts that are added; `seen` are the variables that are being looked up.
        """
        parts = []
        while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            parts.append((node.func.attr, [*node.args]))
            node = node.func.value
        query = self._root(node, seen)
        if query is None or any(name in NESTED for name, _ in parts):
            return None
        for name, arguments in parts:
            query.add(name, [part for argument in arguments for part in self._unpack(argument)])
        return query

    def _unpack(self, argument: ast.expr) -> list[ast.expr]:
        """Return the parts of `*conditions`, a variable that is a list or a tuple."""
        if not isinstance(argument, ast.Starred):
            return [argument]
        values = [argument.value]
        if isinstance(argument.value, ast.Name):
            values = self.values(argument.value.id, self.scope(argument.value))
        parts = [part for value in values if isinstance(value, ast.List | ast.Tuple) for part in value.elts]
        return parts or [argument]

    def _root(self, node: ast.expr, seen: frozenset[str]) -> Query | None:
        if isinstance(node, ast.Name):
            if node.id in seen:
                return Query()
            values = self.values(node.id, self.scope(node)) or self.values(node.id, self.tree)
            return self._merge(values, seen | {node.id})
        if isinstance(node, ast.IfExp):
            return self._merge([node.body, node.orelse], seen)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            name = node.func.id
            if name in ROOTS:
                entities = [part for argument in node.args for part in self._unpack(argument)]
                return Query(ast.unparse(node), entities=entities)
            if name == "apply_keyset":  # of app.core.pagination: a page in the order of these columns
                query = self.query(node.args[0], seen)
                if query is not None:
                    query.add("order_by", self._unpack(ast.copy_location(ast.Starred(node.args[1]), node)))
                return query
            if name in self.functions and name not in seen:
                results = [part.value for part in ast.walk(self.functions[name]) if isinstance(part, ast.Return)]
                return self._merge([result for result in results if result is not None], seen | {name})
        return None

    def _merge(self, values: list[ast.expr], seen: frozenset[str]) -> Query | None:
        """Return one query with the parts of all."""
        queries = [query for value in values if (query := self.query(value, seen)) is not None]
        merged = Query()
        for query in queries:
            merged.merge(query)
        return merged if merged.text else None

    def use(self, node: ast.AST, depth: int = 0) -> Use:
        """Return what the rows of an expression become whose order matters."""
        parent = self.parents[node]
        if isinstance(parent, ast.Await | ast.Starred):
            return self.use(parent, depth)
        if isinstance(parent, ast.Attribute):
            call = self.parents[parent]
            if parent.attr in SAME_ROWS and isinstance(call, ast.Call):
                return self.use(call, depth)
            return "first()" if parent.attr == "first" else None
        if isinstance(parent, ast.Call):
            name = ast.unparse(parent.func).rpartition(".")[2]
            if name in LISTS:
                wrapped = self.use(parent, depth) if name != "extend" else name
                return wrapped and f"{name}()"
            return None
        if isinstance(parent, ast.List | ast.Tuple | ast.IfExp | ast.BoolOp):
            return self.use(parent, depth)
        if isinstance(parent, ast.comprehension):
            return self._comprehension_use(self.parents[parent], depth)
        if isinstance(parent, ast.For | ast.AsyncFor) and parent.iter is node:
            return self._loop_use(parent)
        if isinstance(parent, ast.Return):
            return "returned"
        if isinstance(parent, ast.Assign | ast.AnnAssign | ast.NamedExpr) and depth < 3:
            targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
            uses = [self._variable_use(target, depth) for target in targets]
            return next((use for use in uses if use), None)
        if isinstance(parent, ast.Compare):
            return "compared"
        return None

    def _comprehension_use(self, node: ast.AST, depth: int) -> Use:
        if isinstance(node, ast.ListComp | ast.GeneratorExp):
            use = self.use(node, depth)
            return use and f"comprehension, {use}"
        return None

    def _loop_use(self, loop: ast.For | ast.AsyncFor) -> Use:
        """Return "loop" if its body appends to a list, yields, or ends early."""
        for node in (part for statement in loop.body for part in ast.walk(statement)):
            if isinstance(node, ast.Yield | ast.Break | ast.Return):
                return "loop"
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("append", "extend"):
                return "loop"
        return None

    def _variable_use(self, target: ast.expr, depth: int) -> Use:
        if isinstance(target, ast.List | ast.Tuple):
            return "unpacked" if len(target.elts) > 1 else None
        if not isinstance(target, ast.Name):
            return "kept"
        for node in ast.walk(self.scope(target)):
            if isinstance(node, ast.Name) and node.id == target.id and isinstance(node.ctx, ast.Load):
                parent = self.parents[node]
                if isinstance(parent, ast.Subscript) and parent.value is node:
                    return "an element"
                if use := self.use(node, depth + 1):
                    return use
        return None

    def findings(self, keys: dict[str, list[set[str]]]) -> Iterator[Finding]:
        for node in ast.walk(self.tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr not in EXECUTE or not node.args:
                continue
            query = self.query(node.args[0])
            if query is None or query.is_one_row or query.is_ordered(keys):
                continue
            use = "limit" if query.has_limit else self.use(node)
            if use:
                scope = self.scope(node)
                name = scope.name if isinstance(scope, Function) else ""
                yield Finding(node.lineno, name, query.text, use)


def find_unordered_queries(path: Path) -> list[Finding]:
    """Return the queries of a module whose rows have no complete order, although their order matters."""
    text = path.read_text()
    return sorted(Source(ast.parse(text)).findings(model_keys())) if "select(" in text else []
