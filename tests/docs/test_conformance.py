"""Pages of conformance name every request field of the three APIs; tests that a page names exist."""

import re
from pathlib import Path

import pytest

from app.chat.schemas import IGNORED_HINTS, UNSUPPORTED_UNLESS, ChatRequest
from app.core.settings import REPOSITORY
from app.messages.schemas import MessagesRequest
from app.responses.request import ResponsesRequest

NAMES = ("conformance.md", "messages.md", "connect/index.md", "connect/traps.md", "agent-traps.md")
PAGES = "".join((REPOSITORY / "docs" / name).read_text() for name in NAMES)
TEST = re.compile(r"`(tests/[\w/.]+)(?:::(\w+))?`")
NAMED_TEST = re.compile(r"`(?:(tests/[\w/.]+)(?:::(\w+))?|…::(\w+))`")


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading."""
    table = PAGES.partition(f"## `{heading}`\n")[2].lstrip().partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]


@pytest.mark.parametrize(
    ("heading", "fields"),
    [
        ("POST /v1/chat/completions", {*ChatRequest.model_fields, *IGNORED_HINTS, *UNSUPPORTED_UNLESS}),
        ("POST /v1/responses", set(ResponsesRequest.model_fields)),
        ("POST /v1/messages", set(MessagesRequest.model_fields)),
    ],
)
def test_every_request_field_is_listed_with_a_test(heading: str, fields: set[str]) -> None:
    table = rows(heading)
    assert fields <= {name for field, *_ in table for name in re.findall(r"`(\w+)`", field)}
    assert [field for field, _, tests in table if not TEST.search(tests)] == []


@pytest.mark.parametrize("page", sorted((REPOSITORY / "docs").rglob("*.md")), ids=lambda page: page.stem)
def test_every_test_that_is_named_exists(page: Path) -> None:
    """`…::name` is a test of the file that was named last."""
    missing, path = [], ""
    for file, name, other_name in NAMED_TEST.findall(page.read_text()):
        path, name = file or path, name or other_name
        source = (REPOSITORY / path).read_text() if (REPOSITORY / path).is_file() else None
        if (source is None and not (REPOSITORY / path).is_dir()) or (name and f"def {name}(" not in (source or "")):
            missing.append(f"{path}::{name}")
    assert missing == []
