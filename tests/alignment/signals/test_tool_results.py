"""Tool results: structure before words, counts are read, and what is unsure is neither success nor failure.

`tool_results.jsonl` holds what real programs printed, with their exit status, the HTTP status or MCP's `isError` as the
label. The rules were adjusted to the mistakes on the rows of `development`; of `held_out` only the counts were looked
at. Both parts come from the same tools.
"""

import json
from collections import Counter
from pathlib import Path

import pytest
from pydantic import JsonValue

from alignment.signals.tool_results import outcome

ROWS = [json.loads(line) for line in Path(__file__).with_name("tool_results.jsonl").read_text().splitlines()]
LABELS = {"success": True, "failure": False}


def count_outcomes(part: str) -> Counter[str]:
    results = [(outcome(row["content"]), LABELS[row["label"]]) for row in ROWS if row["part"] == part]
    return Counter("unsure" if result is None else "right" if result is label else "wrong" for result, label in results)


def test_accuracy_on_the_results_of_real_tools() -> None:
    """docs/rewards.md states these counts."""
    assert len(ROWS) >= 200 and len({row["tool"] for row in ROWS}) >= 20
    assert count_outcomes("development") == Counter(right=111, wrong=0, unsure=22)
    assert count_outcomes("held_out") == Counter(right=100, wrong=3, unsure=29)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("Errors: 0 in 14 files", True),
        ("Failures: 0", True),
        ("Tests run: 5, Failures: 0, Errors: 0, Skipped: 1", True),
        ("Tests run: 5, Failures: 1, Errors: 0, Skipped: 0", False),
        ("0 errors, 3 warnings", True),
        ("✖ 3 problems (2 errors, 1 warning)", False),
        ("PLAY RECAP: web1 : ok=4 changed=1 unreachable=0 failed=0", True),
        ("PLAY RECAP: web1 : ok=4 changed=1 unreachable=0 failed=2", False),
        ("no errors", True),
        ('{"error": "none"}', True),
        ('{"error": null, "status": "sent"}', True),
        ('{"errors": []}', True),
        ('{"errors": 0, "checked": 14}', True),
        ('{"errors": 2, "checked": 14}', False),
        ('{"error": {"code": 0, "message": ""}}', True),
        ('{"error": "no such order"}', False),
        ('{"errors": ["x"]}', False),
        ('{"ok": false}', False),
        ('{"ok": "true"}', True),
        ('{"ok": true, "error": "partly"}', None),
        ('{"exit_code": 1, "stdout": "done"}', False),
        ('{"exit_code": 0, "stdout": "ERROR in the log"}', True),
        ('{"status": 404, "body": {}}', False),
        ('{"status": "failed"}', False),
        ('{"status": "sent"}', True),
        ('{"title": "Error: a history", "author": "K. Schulz"}', True),
        ('{"jsonrpc": "2.0", "id": 1, "error": {"code": -32602, "message": "Unknown tool"}}', False),
        ('{"content": [{"type": "text", "text": "declined"}], "isError": true}', False),
        ('{"content": [{"type": "text", "text": "Failures: 0"}], "isError": false}', True),
        ('[{"type": "text", "text": "order 9 is unknown", "isError": true}]', False),
        ('[{"type": "text", "text": "Error executing tool find_order"}]', False),
        ('[{"type": "text", "text": "an article about errors"}]', None),
        ([{"type": "text", "text": "Error executing tool find_order"}], False),
        ([{"type": "text", "text": "sent"}], True),
        ('[{"id": 9, "error": "declined"}, {"id": 7, "error": null}]', True),
        ('"Error: x"', False),
        ("Error: no such order", False),
        ("ERROR! no", False),
        ("Traceback (most recent call last):", False),
        ("ValueError: no such order", False),
        ("Failed to connect", False),
        ("[error] no such order", False),
        ("HTTP/1.1 404 Not Found", False),
        ("HTTP/1.1 200 OK\n\nErrors are logged", True),
        ("stopping\nExit code: 3", False),
        ("ERROR in the log\nExit code: 0", True),
        ("sent", True),
        ("ok", True),
        ("[]", True),
        ("0", True),
        ("", None),
        ("null", None),
        (None, None),
        ("Errors are human, says the book", None),
        ("error-free", None),
        ("Failed orders last week: 3", None),
        ("2026-11-02 ERROR payment timed out", None),
        ("[" * 5000, None),
    ],
)
def test_outcome(content: JsonValue, expected: bool | None) -> None:
    assert outcome(content) is expected


@pytest.mark.parametrize(
    "text",
    ["\n" * 40_000, "9" * 40_000, "usage: \n" * 5_000, "a: " * 13_000, "=" * 40_000, "failed " * 6_000, "a." * 20_000],
)
@pytest.mark.timeout(120)  # work that grows with the square of a text's length would take hours
def test_hostile_texts_are_read(text: str) -> None:
    outcome(text)
