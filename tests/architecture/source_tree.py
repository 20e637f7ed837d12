"""The Python files of the repository, parsed: modules, imports, cycles and lines of code."""

import ast
import io
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from app.core.settings import REPOSITORY

PACKAGES = ("app", "alignment", "workers")
# Distributions of their own, with their own top-level packages.
PLUGINS = ("workers/engine/plugin", "workers/engine/vllm_plugin")


@dataclass(frozen=True)
class Module:
    """A module. Example: Module("app.chat.service", Path("app/chat/service.py"))"""

    name: str
    path: Path

    @property
    def package(self) -> str:
        """The name's first two parts. Example: "app.chat" """
        return ".".join(self.name.split(".")[:2])

    @property
    def source(self) -> str:
        return (self.root / self.path).read_text()

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.source, str(self.path))

    root: Path = REPOSITORY


def find_modules(*folders: str, root: Path = REPOSITORY) -> list[Module]:
    """Return the modules in these folders, without the plug-ins of engines and their build output."""
    modules = []
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            relative = path.relative_to(root)
            if relative.as_posix().startswith(PLUGINS) or {"__pycache__", "build"} & {*relative.parts}:
                continue
            parts = relative.with_suffix("").parts
            modules.append(Module(".".join(parts[:-1] if parts[-1] == "__init__" else parts), relative, root))
    return modules


def import_graph(modules: Iterable[Module]) -> dict[str, set[str]]:
    """Return the modules that each module imports, including imports in functions and under TYPE_CHECKING."""
    by_name = {module.name: module for module in modules}
    return {name: {target for target in _imports(module) if target in by_name} for name, module in by_name.items()}


def _imports(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if _is_module(module.root, submodule) else node.module


@cache
def _is_module(root: Path, name: str) -> bool:
    path = root / name.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def package_graph(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return the imports between packages, named by the first two parts of module names."""
    packages: dict[str, set[str]] = {}
    for name, targets in graph.items():
        package = ".".join(name.split(".")[:2])
        others = packages.setdefault(package, set())
        others |= {".".join(target.split(".")[:2]) for target in targets} - {package}
    return packages


def find_cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components with a cycle (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    cycles: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1 or node in graph.get(node, ()):
                cycles.append(sorted(component))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return cycles


def count_code_lines(source: str) -> int:
    """Count the lines with code: docstrings, comments and blank lines do not count."""
    lines: set[int] = set()
    ignored = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in ignored:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                lines.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)
