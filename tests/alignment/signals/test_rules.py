"""Rules, and which turns a source is asked about."""

import sys
from importlib.metadata import EntryPoint, EntryPoints
from types import ModuleType
from typing import Any

import pytest

from alignment import extensions
from alignment.config.rewards import RewardsConfig
from alignment.signals import rules
from alignment.signals.eligibility import is_in_share
from alignment.signals.rules import (
    NeedsNextMessage,
    RuleInput,
    UnknownRule,
    ended,
    length,
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
    monkeypatch.setattr(extensions, "entry_points", lambda **wanted: points.select(**wanted))
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
        with pytest.raises(UnknownRule):
            load_rule(name, allow_import=dotted)


def test_imported_rules_are_recognised() -> None:
    config = RewardsConfig.model_validate(
        {
            "sources": [
                {"type": "rule", "name": "a", "function": "ended"},
                {"type": "rule", "name": "b", "function": "os:system"},
            ]
        }
    )
    assert rules.imported_rules(config) == ("os:system",)
    assert rules.imported_rules(RewardsConfig()) == ()


def test_share_is_exact_on_average_and_stable() -> None:
    turns = [f"chatcmpl-{number}" for number in range(4000)]
    half = {turn for turn in turns if is_in_share(turn, "judge", 0.5)}
    assert half == {turn for turn in turns if is_in_share(turn, "judge", 0.5)}
    assert 1850 < len(half) < 2150
    assert {turn for turn in turns if is_in_share(turn, "judge", 0.1)} < half
    assert all(is_in_share(turn, "judge", 1.0) for turn in turns)
    both = half & {turn for turn in turns if is_in_share(turn, "other", 0.5)}
    assert 850 < len(both) < 1150, "sources draw on their own"
