"""Verifiers: a table of replies for each, hostile replies, and invalid settings."""

import sys
from types import ModuleType
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from alignment.errors import UnknownExtension
from alignment.signals import verifiers
from alignment.signals.verifiers import Unverifiable, VerifierConfig, VerifierInput, read_choice
from app.core.settings import Settings
from app.training.policy_config import load_verifier

CONFIG: TypeAdapter[VerifierConfig] = TypeAdapter(VerifierConfig)


def verdict(config: dict[str, Any], text: str | None, reference: str | None = None) -> float | None:
    attempt = VerifierInput(
        ({"role": "user", "content": "?"},), {"role": "assistant", "content": text}, reference, "stop"
    )
    return load_verifier(config, Settings())(attempt)


@pytest.mark.parametrize(
    ("config", "text", "reference", "value"),
    [
        ({"type": "exact"}, " Paris\n", "paris", 1.0),
        ({"type": "exact", "ignore_case": False}, "Paris", "paris", -1.0),
        ({"type": "exact"}, "It is Paris", "Paris", -1.0),
        ({"type": "exact"}, None, "Paris", -1.0),
        ({"type": "exact"}, "Paris", None, None),
        ({"type": "exact"}, "Paris", "  ", None),
        ({"type": "contains"}, "It is PARIS, of course", "paris", 1.0),
        ({"type": "contains"}, "It is Rome", "paris", -1.0),
        ({"type": "number"}, "3 bikes at 400 are 1,200.00 in all.", "1200", 1.0),
        ({"type": "number"}, "That is 1.200,50 euros", "1200.5", 1.0),
        ({"type": "number"}, "Twelve.", "12", None),
        ({"type": "number"}, " ", "12", -1.0),
        ({"type": "number"}, "It costs 7{,}250.", "7250", 1.0),
        ({"type": "number"}, "It costs 7{,}250.", "250", -1.0),
        ({"type": "number"}, "It costs 7.250.", "7250", None),
        ({"type": "number"}, r"\boxed{\frac{3}{4}}", "0.75", 1.0),
        ({"type": "exact"}, "Cafe\u0301", "Caf\u00e9", 1.0),
        ({"type": "contains"}, "the Cafe\u0301", "CAF\u00c9", 1.0),
        ({"type": "number"}, "It is 13", "12", -1.0),
        ({"type": "number", "tolerance": 0.1}, "It is 13", "12", 1.0),
        ({"type": "number"}, "-7", "7", -1.0),
        ({"type": "number"}, "7", None, None),
        ({"type": "regex", "pattern": r"\bplease\b"}, "Come in, please.", None, 1.0),
        ({"type": "regex", "pattern": "please", "whole": True}, "Come in, please", None, -1.0),
        ({"type": "regex", "ignore_case": True}, "THANKS a lot", "^thanks", 1.0),
        ({"type": "regex"}, "anything", None, None),
        ({"type": "choice"}, "The answer is (B).", "B", 1.0),
        ({"type": "choice"}, "b", "(B)", 1.0),
        ({"type": "choice"}, "I do not know", "B", None),
        ({"type": "choice"}, r"\boxed{B}", "B", 1.0),
        ({"type": "choice"}, r"So $\boxed{\text{C}}$, not (B)", "B", -1.0),
        ({"type": "choice"}, "", "B", -1.0),
        ({"type": "json_schema", "schema": {"type": "object", "required": ["a"]}}, '{"a": 1}', None, 1.0),
        ({"type": "json_schema", "schema": {"type": "object", "required": ["a"]}}, '{"b": 1}', None, -1.0),
        ({"type": "json_schema", "schema": {"type": "array"}}, "Here you are:\n```json\n[1]\n```", None, 1.0),
        ({"type": "json_schema"}, "[1]", '{"type": "array"}', 1.0),
        ({"type": "json_schema"}, "[1]", None, None),
        ({"type": "json_schema", "schema": {"pattern": "^a+$"}}, '"aab"', None, -1.0),
        (
            {"type": "json_schema", "schema": {"patternProperties": {"^n": {"type": "number"}}}},
            '{"n1": "x"}',
            None,
            -1.0,
        ),
    ],
)
def test_reply_is_right_or_wrong(config: dict[str, Any], text: str, reference: str | None, value: float) -> None:
    assert verdict(config, text, reference) == value


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("C", "C"),
        ("c.", "C"),
        ("(D)", "D"),
        ("B) nine to six", "B"),
        ("Answer: D", "D"),
        ("answer A. Wait, the answer is B", "B"),
        ("Not (A) but (C)", "C"),
        ("A bike is nice", None),
        ("The answer is a bit tricky, but it must be (B).", "B"),
        ("Option a lot of people pick is C, but the correct one is (D)", "D"),
        ("The best option is I think B)", "B"),
        ("A. is wrong, so the answer is B", "B"),
        ("The answer is A because shops close", "A"),
        ("the answer is b.", "B"),
        ("I think the correct option is I", "I"),
        (r"\boxed{B}", "B"),
        (r"$\boxed{\text{(D)}}$", "D"),
        (r"\boxed{\mathrm{A}} is what I choose, since B) is not", "A"),
        (r"\boxed{Blue}", None),
        ("**B**", "B"),
        ("The answer is **(C)**.", "C"),
        ("\uff22", "B"),
        ("【D】", "D"),
        ("", None),
    ],
)
def test_chosen_letter_is_found(text: str, letter: str | None) -> None:
    assert read_choice(text) == letter


HUGE = "9" * 2_000_000


@pytest.mark.parametrize(
    "text",
    [HUGE, "[" * 1_000_000, "1," * 500_000, "(A)" * 300_000, "a" * 1_000_000 + "!", "\x00\ud800", "🙂" * 100_000],
)
@pytest.mark.parametrize(
    "config",
    [
        {"type": "exact"},
        {"type": "contains"},
        {"type": "number"},
        {"type": "choice"},
        {"type": "regex", "pattern": "^(a|b)*c$"},
        {"type": "json_schema", "schema": {"type": "object"}},
    ],
    ids=lambda config: config["type"],
)
@pytest.mark.timeout(120)  # work that grows with the square of a reply's length would take hours
def test_hostile_replies_are_verified(monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], text: str) -> None:
    for name in ("PATTERN_SECONDS", "SCHEMA_SECONDS"):  # other load on the machine must not exceed the limit
        monkeypatch.setattr(verifiers, name, 30.0)
    reference = {"number": "7", "choice": "B"}.get(config["type"], "x")
    assert verdict(config, text, reference) in (-1.0, None)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"type": "regex", "pattern": "^(a|aa)+$"}, "a" * 200 + "b"),
        ({"type": "json_schema", "schema": {"pattern": "^(a|aa)+$"}}, '"' + "a" * 200 + 'b"'),
    ],
)
def test_catastrophic_pattern_is_stopped(config: dict[str, Any], text: str) -> None:
    with pytest.raises(Unverifiable, match="more than 1 s"):
        verdict(config, text)


@pytest.mark.parametrize(
    ("config", "reference"),
    [
        ({"type": "number"}, "a dozen"),
        ({"type": "choice"}, "the second one"),
        ({"type": "regex"}, "("),
        ({"type": "json_schema"}, "no schema"),
        ({"type": "json_schema"}, '{"type": 7}'),
        ({"type": "json_schema"}, '{"$ref": "http://127.0.0.1:9/schema.json"}'),
        ({"type": "json_schema"}, '{"$ref": "#"}'),
    ],
)
def test_invalid_reference_is_unverifiable(config: dict[str, Any], reference: str) -> None:
    with pytest.raises(Unverifiable):
        verdict(config, "{}", reference)


@pytest.mark.parametrize(
    "config",
    [
        {"type": "regex", "pattern": "("},
        {"type": "json_schema", "schema": {"type": 7}},
        {"type": "custom"},
        {"type": "custom", "name": "os:system"},
        {"type": "nobody"},
        {"type": "exact", "more": 1},
    ],
)
def test_invalid_settings_are_rejected(config: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        CONFIG.validate_python(config)


def test_custom_verifiers_are_loaded_by_settings_and_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("shop_checks")
    module.half = lambda attempt: 0.5  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "shop_checks", module)
    config = {"type": "custom", "name": "half"}
    settings = Settings(rollouts={"verifiers": {"half": "shop_checks:half"}})
    assert load_verifier(config, settings)(VerifierInput((), {}, None, None)) == 0.5
    with pytest.raises(UnknownExtension, match="no verifier 'half'"):
        load_verifier(config, Settings())


def test_time_limit_of_a_schema_ends_with_its_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other validations follow in the same context: of arguments of tools, of other replies."""
    monkeypatch.setattr(verifiers, "SCHEMA_SECONDS", -1.0)
    with pytest.raises(Unverifiable, match="took more than"):
        verdict({"type": "json_schema", "schema": {"type": "object"}}, "{}", None)
    assert verifiers.TimedValidator({"type": "object"}).is_valid({})


def test_endless_schema_is_stopped() -> None:
    chain: dict[str, Any] = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}
    schema = {"$defs": {**chain, "d40": {"type": "object"}}, "$ref": "#/$defs/d0"}
    with pytest.raises(Unverifiable, match="took more than"):
        verdict({"type": "json_schema", "schema": schema}, "{}", None)
    with pytest.raises(Unverifiable, match="more than 16384"):
        verdict({"type": "json_schema"}, "{}", '{"enum": ["' + "x" * 20_000 + '"]}')
