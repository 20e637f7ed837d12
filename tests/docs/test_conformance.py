"""Pages of conformance name every request field of the three APIs; they and those of front ends, tests that exist."""

import re

import pytest

from app.chat.schemas import IGNORED_HINTS, UNSUPPORTED_UNLESS, ChatRequest
from app.core.settings import REPOSITORY
from app.messages.schemas import MessagesRequest
from app.responses.request import ResponsesRequest

NAMES = ("conformance.md", "messages.md", "connect/index.md", "connect/traps.md", "agent-traps.md")
PAGES = "".join((REPOSITORY / "docs" / name).read_text() for name in NAMES)
TEST = re.compile(r"`(tests/[\w/.]+)(?:::(\w+))?`")


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


def test_every_test_that_is_named_exists() -> None:
    missing = []
    for path, name in TEST.findall(PAGES):
        file = REPOSITORY / path
        if not file.exists() or (name and f"def {name}(" not in file.read_text()):
            missing.append(f"{path}::{name}")
    assert missing == []
