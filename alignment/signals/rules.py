"""Rules: what a reply is worth by a function of the turn alone. And which turns a source is asked about."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from alignment import extensions
from alignment.config.rewards import RewardsConfig, RuleSource
from alignment.errors import AlignmentError
from alignment.signals.length_penalty import length_penalty

ENTRY_POINTS = "attune.rewards"
TROUBLE = re.compile(
    r"\W*(error|exception|failure|fatal)s?\s*[:(\]!]|\W*traceback\b|\W*failed (to|with)\b|\w+(Error|Exception):", re.I
)
BAD = ("error", "errors", "exception", "is_error", "isError")
OUTCOMES = ("ok", "success", "succeeded")


class UnknownRule(AlignmentError):
    """Neither one of ours, nor an entry point, nor a function that may be imported."""


class NotYet(Exception):
    """A rule raises it where only the next message can tell; it is asked again until its window is over."""


@dataclass(frozen=True)
class Facts:
    """What a rule may know of a turn. Messages are OpenAI's, as plain dicts."""

    messages: tuple[Mapping[str, Any], ...]  # the prompt
    reply: Mapping[str, Any] | None  # the assistant's message; None if nothing came
    finish_reason: str | None
    state: str  # done, aborted, failed
    num_output_tokens: int | None
    next_messages: tuple[Mapping[str, Any], ...] = ()  # what followed the reply: of a user or of tools
    details: Mapping[str, str] = field(default_factory=dict)  # the caller's metadata
    length_range: tuple[int, int] | None = None  # the deployment's, in tokens

    @property
    def next_message(self) -> Mapping[str, Any] | None:
        return self.next_messages[-1] if self.next_messages else None


Rule = Callable[[Facts], float | None]


def tool_outcome(facts: Facts) -> float | None:
    """-1 for a call whose arguments are no JSON object or whose tool reports an error, 1 when all went well."""
    calls = (facts.reply or {}).get("tool_calls") or ()
    if not calls:
        return None
    if not all(_is_object(call["function"]["arguments"]) for call in calls):
        return -1.0
    if not facts.next_messages:
        raise NotYet("the tools have not answered")
    told = [message for message in facts.next_messages if message.get("role") == "tool"]
    if not told:
        return None
    return -1.0 if any(reports_error(message.get("content")) for message in told) else 1.0


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False


def reports_error(content: Any) -> bool:
    """JSON that names an error or says it was no success; or text that begins as errors do.

    Example: '{"error": "no such order"}', '{"ok": false}', "Error: no such order", "Traceback (most recent call last)"
    """
    text = content if isinstance(content, str) else ""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        told = text
    if isinstance(told, dict):
        return any(told.get(name) for name in BAD) or any(told.get(name) is False for name in OUTCOMES)
    return isinstance(told, str) and TROUBLE.match(told) is not None


def length(facts: Facts) -> float | None:
    """1 within the deployment's ATTUNE_LENGTH_RANGE, below 0 outside: the further the worse, down to -1."""
    if facts.length_range is None or facts.state != "done" or not facts.num_output_tokens:
        return None
    return length_penalty(facts.num_output_tokens, *facts.length_range) or 1.0


def ended(facts: Facts) -> float | None:
    """-1 for a reply that broke off, failed or was cut: it must not be worth more than a poor one that is whole."""
    return -1.0 if facts.state != "done" or facts.finish_reason == "length" else None


RULES: dict[str, Rule] = {"tool_outcome": tool_outcome, "length": length, "ended": ended}


def find(name: str, *, dotted: bool) -> Rule:
    """The rule of that name: ours, an entry point's, or (where `dotted` allows it) `module:function`'s.

    Raises UnknownRule. Importing may raise anything.
    """
    if name in RULES:
        return RULES[name]
    if ":" in name and not dotted:
        raise UnknownRule(f"{name!r}: a policy's own rewards cannot name a module; the deployment's settings can.")
    try:
        rule: Rule = extensions.load(name, ENTRY_POINTS, RULES, noun="rule")
    except extensions.UnknownFunction as error:
        raise UnknownRule(str(error)) from error
    return rule


def dotted(config: RewardsConfig) -> tuple[str, ...]:
    """The rules that would be imported from a module: not for a policy's own rewards, which tenants may write."""
    return tuple(
        source.function for source in config.sources if isinstance(source, RuleSource) and ":" in source.function
    )


def asked_about(turn_id: str, source: str, share: float) -> bool:
    """Whether this source is asked about this turn: the same answer every time, and independent between sources."""
    digest = hashlib.sha256(f"{source}/{turn_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64
