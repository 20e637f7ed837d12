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
    tool_outcome,
)


def rule_input(**values: Any) -> RuleInput:
    defaults: dict[str, Any] = {
        "messages": ({"role": "user", "content": "hi"},),
        "reply": {"role": "assistant", "content": "hello"},
        "finish_reason": "stop",
        "state": "done",
        "num_output_tokens": 40,
    }
    return RuleInput(**(defaults | values))


def reply_with_calls(*arguments: str) -> dict[str, Any]:
    calls = [{"id": "c", "type": "function", "function": {"name": "order", "arguments": text}} for text in arguments]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def tool_results(*contents: str) -> tuple[dict[str, str], ...]:
    return tuple({"role": "tool", "content": content} for content in contents)


@pytest.mark.parametrize(
    ("reply", "after", "value"),
    [
        (reply_with_calls('{"id": 7}'), tool_results('{"status": "sent"}'), 1.0),
        (reply_with_calls('{"id": 7}'), tool_results('{"error": "no such order"}'), -1.0),
        (reply_with_calls('{"id": 7}', "{}"), tool_results("ok", "Error: time-out"), -1.0),
        (reply_with_calls("{}", "{}"), tool_results("ok", "Errors: 0 in 14 files"), 1.0),
        (reply_with_calls("{}", "{}"), tool_results("ok", "an article about errors"), None),
        (reply_with_calls("{}", "{}"), tool_results("Error: time-out", "an article about errors"), -1.0),
        (reply_with_calls('{"id": 7'), (), -1.0),
        (reply_with_calls("[7]"), (), -1.0),
        (reply_with_calls("{}", ""), tool_results("ok"), -1.0),
        (reply_with_calls("{}"), ({"role": "user", "content": "never mind"},), None),
        ({"role": "assistant", "content": "hello"}, (), None),
        (None, (), None),
    ],
)
def test_tool_outcome_rewards_success_and_penalises_errors(reply: Any, after: Any, value: float | None) -> None:
    assert tool_outcome(rule_input(reply=reply, next_messages=after, finish_reason="tool_calls")) == value


@pytest.mark.parametrize("finish_reason", ["length", "stop", "abort"])
def test_tool_outcome_says_nothing_about_a_call_that_was_cut(finish_reason: str) -> None:
    cut = rule_input(
        reply=reply_with_calls('{"order": '),
        next_messages=tool_results("Error: the arguments are cut"),
        finish_reason=finish_reason,
    )
    assert tool_outcome(cut) is None


def test_tool_outcome_waits_for_the_result() -> None:
    with pytest.raises(NeedsNextMessage):
        tool_outcome(rule_input(reply=reply_with_calls("{}")))


@pytest.mark.parametrize(("tokens", "value"), [(30, 1.0), (80, 1.0), (105, -0.25), (5, -0.25), (500, -1.0)])
def test_length_rule_uses_the_trainers_penalty(tokens: int, value: float) -> None:
    assert length(rule_input(num_output_tokens=tokens, length_range=(30, 80))) == value


def test_length_rule_needs_a_range_and_a_complete_reply() -> None:
    assert length(rule_input()) is None
    assert length(rule_input(state="aborted", length_range=(30, 80))) is None


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
    assert ended(rule_input(state=state, finish_reason=finish_reason)) == value


def test_rule_is_loaded_by_name_entry_point_or_path(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("shop_rules")
    module.constant = lambda rule_input: 1.0  # type: ignore[attr-defined]
    module.number = 7  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "shop_rules", module)
    entry_points = EntryPoints([EntryPoint("custom", "shop_rules:constant", rules.ENTRY_POINTS)])
    monkeypatch.setattr(extensions, "entry_points", lambda **expected: entry_points.select(**expected))
    assert load_rule("ended", allow_import=False) is ended
    assert load_rule("custom", allow_import=False)(rule_input()) == 1.0
    assert load_rule("shop_rules:constant", allow_import=True)(rule_input()) == 1.0
    for name, allow_import in (
        ("missing", True),
        ("shop_rules:missing", True),
        ("no_such_module:f", True),
        ("shop_rules:number", True),
        ("shop_rules:constant", False),
    ):
        with pytest.raises(UnknownExtension):
            load_rule(name, allow_import=allow_import)


@pytest.mark.parametrize(
    ("length", "penalty"), [(30, 0.0), (80, 0.0), (55, 0.0), (105, -0.25), (5, -0.25), (81, -0.0004), (400, -1.0)]
)
def test_length_penalty_is_quadratic_outside_the_range(length: int, penalty: float) -> None:
    assert length_penalty(length, 30, 80) == pytest.approx(penalty)
