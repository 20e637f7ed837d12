"""The documents name modules, functions and make targets that exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from app.core.settings import REPOSITORY
from tests.architecture.source_tree import PACKAGES, find_modules

DOCUMENTS = sorted(
    path.relative_to(REPOSITORY).as_posix()
    for path in (*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("**/*.md"))
    if path.name != "CHANGELOG.md"
)
FILE = re.compile(
    r"`((?:app|alignment|workers|migrations|demo|tests|docker|requirements|examples|clients)/[\w/.-]+\.\w+)`"
)
NAME = re.compile(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)?)`")
TARGET = re.compile(r"\bmake ([a-z][a-z-]+)\b(?=[`\n ]*(?:ATTUNE|$|`|#))", re.MULTILINE)


@cache
def defined_functions() -> set[str]:
    """Return the names of all functions, methods and classes, methods also as `Class.method`."""
    names = set()
    for module in find_modules(*PACKAGES):
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            if isinstance(node, ast.ClassDef):
                names |= {
                    f"{node.name}.{part.name}"
                    for part in node.body
                    if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
                }
    return names


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_files_exist(document: str) -> None:
    text = (REPOSITORY / document).read_text()
    missing = [path for path in FILE.findall(text) if "YYYY" not in path and not (REPOSITORY / path).exists()]
    assert not missing, f"{document} names files that do not exist: {missing}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_make_targets_exist(document: str) -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", Path(REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    missing = set(TARGET.findall((REPOSITORY / document).read_text())) - targets
    assert not missing, f"{document} names make targets that do not exist: {missing}"


def test_functions_of_the_walks_exist() -> None:
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    walks = text[text.index("## Three walks") : text.index("## Style")]
    names = [name for name in NAME.findall(walks) if not name.endswith(".py")]
    missing = [name for name in names if name not in defined_functions()]
    assert len(names) > 40 and not missing, f"CONTRIBUTING.md names functions that do not exist: {missing}"
