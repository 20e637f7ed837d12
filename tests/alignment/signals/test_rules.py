"""Rewards by rules, and the loading of rules of other packages."""

import sys
from importlib.metadata import EntryPoint, EntryPoints
from types import ModuleType
from typing import Any

import pytest

from alignment import extensions
from alignment.errors import UnknownExtension
from alignment.signals import rules
from alignment.signals.rules import (
    NeedsNextMessage,
    RuleInput,
    ended,
    length,
    length_penalty,
    load_rule,
    reports_error,
    tool_outcome,
)


def facts(**values: Any) -> RuleInput:
    common: dict[str, Any] = {
        "messages": ({"role": "user", "content": "hi"},),
        "reply": {"role": "assistant", "content": "hello"},
        "finish_reason": "stop",
        "state": "done",
        "num_output_tokens": 40,
    }
    return RuleInput(**(common | values))


def calling(*arguments: str) -> dict[str, Any]:
    calls = [{"id": "c", "type": "function", "function": {"name": "order", "arguments": one}} for one in arguments]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def answered(*contents: str) -> tuple[dict[str, str], ...]:
    return tuple({"role": "tool", "content": content} for content in contents)


@pytest.mark.parametrize(
    ("reply", "after", "value"),
    [
        (calling('{"id": 7}'), answered('{"status": "sent"}'), 1.0),
        (calling('{"id": 7}'), answered('{"error": "no such order"}'), -1.0),
        (calling('{"id": 7}', "{}"), answered("ok", "Error: time-out"), -1.0),
        (calling('{"id": 7'), (), -1.0),
        (calling("[7]"), (), -1.0),
        (calling("{}", ""), answered("ok"), -1.0),
        (calling("{}"), ({"role": "user", "content": "never mind"},), None),
        ({"role": "assistant", "content": "hello"}, (), None),
        (None, (), None),
    ],
)
def test_tool_outcome_rewards_success_and_penalises_errors(reply: Any, after: Any, value: float | None) -> None:
    assert tool_outcome(facts(reply=reply, next_messages=after)) == value


def test_tool_outcome_waits_for_the_result() -> None:
    with pytest.raises(NeedsNextMessage):
        tool_outcome(facts(reply=calling("{}")))


@pytest.mark.parametrize(
    "content",
    [
        '{"error": "x"}',
        '{"errors": ["x"]}',
        '{"isError": true}',
        '{"ok": false}',
        '"Error: x"',
        "Error: no such order",
        "ERROR! no",
        "Traceback (most recent call last):",
        "ValueError: no such order",
        "Failed to connect",
        "[error] no such order",
    ],
)
def test_errors_are_recognised(content: str) -> None:
    assert reports_error(content)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "sent",
        "null",
        "[]",
        "0",
        '{"error": null, "status": "sent"}',
        '{"errors": []}',
        '{"ok": true}',
        '{"title": "Error: a history"}',
        "Errors are human, says the book",
        "error-free",
        "Failed orders last week: 3",
        "[" * 5000,
        None,
    ],
)
def test_text_about_errors_is_no_error(content: Any) -> None:
    assert not reports_error(content)


@pytest.mark.parametrize(("tokens", "value"), [(30, 1.0), (80, 1.0), (105, -0.25), (5, -0.25), (500, -1.0)])
def test_length_rule_uses_the_trainers_penalty(tokens: int, value: float) -> None:
    assert length(facts(num_output_tokens=tokens, length_range=(30, 80))) == value


def test_length_rule_needs_a_range_and_a_complete_reply() -> None:
    assert length(facts()) is None
    assert length(facts(state="aborted", length_range=(30, 80))) is None


@pytest.mark.parametrize(
    ("state", "finish_reason", "value"),
    [
        ("done", "stop", None),
        ("done", "tool_calls", None),
        ("done", "length", -1.0),
        ("aborted", "client_disconnect", -1.0),
        ("failed", "error", -1.0),
    ],
)
def test_incomplete_replies_are_penalised(state: str, finish_reason: str, value: float | None) -> None:
    assert ended(facts(state=state, finish_reason=finish_reason)) == value


def test_rule_is_loaded_by_name_entry_point_or_path(monkeypatch: pytest.MonkeyPatch) -> None:
    shop = ModuleType("shop_rules")
    shop.always = lambda facts: 1.0  # type: ignore[attr-defined]
    shop.number = 7  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "shop_rules", shop)
    points = EntryPoints([EntryPoint("mine", "shop_rules:always", rules.ENTRY_POINTS)])
    monkeypatch.setattr(extensions, "entry_points", lambda **expected: points.select(**expected))
    assert load_rule("ended", allow_import=False) is ended
    assert load_rule("mine", allow_import=False)(facts()) == 1.0
    assert load_rule("shop_rules:always", allow_import=True)(facts()) == 1.0
    for name, dotted in (
        ("yours", True),
        ("shop_rules:never", True),
        ("no_such_module:f", True),
        ("shop_rules:number", True),
        ("shop_rules:always", False),
    ):
        with pytest.raises(UnknownExtension):
            load_rule(name, allow_import=dotted)


@pytest.mark.parametrize(
    ("length", "penalty"), [(30, 0.0), (80, 0.0), (55, 0.0), (105, -0.25), (5, -0.25), (81, -0.0004), (400, -1.0)]
)
def test_length_penalty_is_quadratic_outside_the_range(length: int, penalty: float) -> None:
    assert length_penalty(length, 30, 80) == pytest.approx(penalty)
