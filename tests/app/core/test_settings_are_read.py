"""Every setting is read by the program: none is accepted and then ignored.

The tree is taken whole: every type of a table with a `type`, optional tables, and the tables in lists. What the
built-in algorithms read is shown by what they compute (`tests/alignment/algorithms/test_algorithm_settings.py`),
because they hand their settings on as parameters of losses. For all other settings the program's text must read the
name from the right owner, elsewhere than in a validator.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from alignment.config.algorithm import UpdateConfig
from alignment.config.rewards import JudgeSource, RuleSource
from app.core.settings import REPOSITORY, Settings
from app.core.settings.tree import leaves
from tests.alignment.algorithms.test_algorithm_settings import CASES

SOURCES = ("app", "workers", "alignment", "demo")


class Reads(ast.NodeVisitor):
    """The attributes that a module reads, each with what its owner is called.

    The owner of `settings.server.port` is `server`. The owner of `port` of a variable is whatever the variable is bound
    from: the attributes and the types of the assigned or iterated expression, its annotation, or the types that
    `isinstance` and `case` compare it with; of `self`, the class.

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

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Leave out validators: what only they read has no effect."""
        if not any(name.endswith("validator") for decorator in node.decorator_list for name in _names(decorator)):
            self.generic_visit(node)

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

    def visit_For(self, node: ast.For) -> None:
        self._bind(node.target, node.iter)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self._bind(node.target, node.iter)
        self.generic_visit(node)

    def visit_Match(self, node: ast.Match) -> None:
        for pattern in (part for case in node.cases for part in ast.walk(case.pattern)):
            if isinstance(pattern, ast.MatchClass):
                self._bind(node.subject, pattern.cls)
        self.generic_visit(node)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        names = set(_names(value))
        if isinstance(target, ast.Name):
            self._by_variable[target.id] |= names.union(*(self._returned.get(name, set()) for name in names))
        elif isinstance(target, ast.Attribute):  # self.config = config
            self._by_variable[target.attr] |= names.union(*(self._by_variable.get(name, set()) for name in names))

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
        """`config.model_dump(include={"eps"})` reads `eps` of `config`; `isinstance(config, C)` says what it is."""
        if isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            self._bind(*node.args)
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


@dataclass(frozen=True)
class Setting:
    """A setting with the table that holds it, and the tables of all types that may stand in that one's place."""

    path: str
    table: type[BaseModel]
    alternatives: tuple[type[BaseModel], ...]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def owners(self) -> set[str]:
        """The names by which code knows the table: its class and the base classes that have the setting.

        Its section too, unless there are types without the setting: then code must have looked at the type.
        """
        kinds = [base for base in self.table.__mro__ if issubclass(base, BaseModel) and self.name in base.model_fields]
        section = self.path.split(".")[-2].partition("[")[0] if "." in self.path else "settings"
        is_shared = all(self.name in kind.model_fields for kind in self.alternatives)
        return {kind.__name__ for kind in kinds} | ({section} if is_shared else set())


def settings_of(tables: tuple[type[BaseModel], ...], path: str = "") -> Iterator[Setting]:
    """Yield every setting at and below a place, with its type in brackets where there are several."""
    for table in tables:
        prefix = f"{path}[{table.model_fields['type'].default}]" if len(tables) > 1 else path
        for name, field in table.model_fields.items():
            place = f"{prefix}.{name}" if prefix else name
            if below := _tables(field.annotation):
                yield from settings_of(below, place)
            elif name != "type":  # which decides on the table
                yield Setting(place, table, tables)


def _tables(annotation: Any) -> tuple[type[BaseModel], ...]:
    """Return the tables within a type, also within lists and free tables."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return (annotation,)
    return tuple(table for part in get_args(annotation) for table in _tables(part))


def is_of_a_built_in_algorithm(setting: Setting) -> bool:
    is_algorithm = setting.path.startswith("algorithm[") and not setting.path.startswith("algorithm[custom]")
    return is_algorithm and not _is_of_every_algorithm(setting)


def _is_of_every_algorithm(setting: Setting) -> bool:
    return issubclass(setting.table, UpdateConfig) and setting.name in UpdateConfig.model_fields


EVERY_SETTING = list(settings_of((Settings,)))
READ_FROM_OWNER = [setting for setting in EVERY_SETTING if not is_of_a_built_in_algorithm(setting)]


@pytest.mark.parametrize("setting", READ_FROM_OWNER, ids=[setting.path for setting in READ_FROM_OWNER])
def test_setting_is_read(setting: Setting) -> None:
    assert any((owner, setting.name) in all_reads() for owner in setting.owners), f"nothing reads {setting.path}"


def test_what_built_in_algorithms_compute_depends_on_all_their_other_settings() -> None:
    shown = {f"algorithm[{name}].{path}" for name, path in CASES}
    left_out = {setting.path for setting in EVERY_SETTING if is_of_a_built_in_algorithm(setting)}
    assert left_out == shown - {path for path in shown if path.endswith(".kl_control")}  # the table as such


def test_tree_is_whole() -> None:
    paths = {setting.path for setting in EVERY_SETTING}
    assert len(paths) == len(EVERY_SETTING) > 450
    assert {
        "trainer.lora.r",
        "release.canary.margin",
        "rewards.sources[judge].rubric",
        "release.gates[prompts].verifier[regex].pattern",
        "algorithm[custom].options",
        "limits.project.pins",
        "secrets",
    } <= paths
    above = {path.partition("[")[0] for path in paths} | {path.rpartition(".")[0] for path in paths}
    assert {leaf.path for leaf in leaves(Settings)} <= paths | above


def reads_of(text: str) -> set[tuple[str, str]]:
    visitor = Reads({})
    visitor.visit(ast.parse(text))
    return visitor.all_reads()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f(settings: Settings):\n    server, x = settings.server, 1\n    return server.port", ("server", "port")),
        ("for gate in release.gates:\n    gate.name", ("gates", "name")),
        ("[source.weight for source in rewards.sources]", ("sources", "weight")),
        ("isinstance(gate, PromptsGate) and gate.dataset", ("PromptsGate", "dataset")),
        ("match gate:\n    case MetricGate():\n        gate.metric", ("MetricGate", "metric")),
        (
            "class A:\n    def __init__(self, source: JudgeSource):\n        self._source = source\n"
            "    def f(self):\n        return self._source.rubric",
            ("JudgeSource", "rubric"),
        ),
    ],
)
def test_owner_of_an_attribute_is_found(text: str, expected: tuple[str, str]) -> None:
    assert expected in reads_of(text)


def test_a_setting_that_nothing_reads_is_found() -> None:
    validator = "class C:\n    @model_validator(mode='after')\n    def check(self):\n        return self.low"
    assert reads_of(validator) == set()
    assert ("server", "host") not in reads_of("server.port") and ("ServerSettings", "unread") not in all_reads()
    alternatives = (JudgeSource, RuleSource)
    other = Setting("rewards.sources[rule].function", RuleSource, alternatives)
    assert other.owners == {"RuleSource"}, "a read of `function` of any source does not count"
    assert Setting("rewards.sources[rule].weight", RuleSource, alternatives).owners >= {"sources", "SourceConfig"}
