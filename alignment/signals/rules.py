"""Rules: rewards computed by a function of the turn."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from alignment import extensions
from alignment.chat_messages import function_calls
from alignment.errors import UnknownExtension
from alignment.signals.tool_results import outcome

ENTRY_POINTS = "attune.rewards"


class NeedsNextMessage(Exception):
    """Raised by a rule that needs the next message. The rule runs again until its window is over."""


@dataclass(frozen=True)
class RuleInput:
    """The facts of a turn that a rule may use. Messages have OpenAI's format, as plain dicts."""

    messages: tuple[Mapping[str, object], ...]  # the prompt
    reply: Mapping[str, object] | None  # the assistant's message; None without a reply
    finish_reason: str | None
    state: str  # done, aborted, failed
    num_output_tokens: int | None
    next_messages: tuple[Mapping[str, object], ...] = ()  # messages after the reply, of a user or of tools
    metadata: Mapping[str, str] = field(default_factory=dict)  # of the request
    length_range: tuple[int, int] | None = None  # of the deployment's settings, in tokens

    @property
    def next_message(self) -> Mapping[str, object] | None:
        return self.next_messages[-1] if self.next_messages else None


Rule = Callable[[RuleInput], float | None]


def tool_outcome(turn: RuleInput) -> float | None:
    """Return -1 for a tool call with invalid arguments or whose tool reports a failure, 1 if all report success.

    None where that is unsure (`alignment.signals.tool_results`). A call that a limit or a stop text cut says nothing
    about the model: its finish reason is not "tool_calls".
    """
    calls = function_calls(turn.reply or {})
    if not calls:
        return None
    if not all(_is_object(call["arguments"]) for call in calls):
        return -1.0 if turn.finish_reason in ("tool_calls", None) else None
    if not turn.next_messages:
        raise NeedsNextMessage("the tools have not answered yet")
    results = [message for message in turn.next_messages if message.get("role") == "tool"]
    if not results:
        return None
    outcomes = {outcome(message.get("content")) for message in results}
    return -1.0 if False in outcomes else None if None in outcomes else 1.0


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False


def length(turn: RuleInput) -> float | None:
    """Return 1 within `observability.length_range`, outside it the penalty of `length_penalty`, down to -1."""
    if turn.length_range is None or turn.state != "done" or not turn.num_output_tokens:
        return None
    return length_penalty(turn.num_output_tokens, *turn.length_range) or 1.0


def length_penalty(length: int, shortest: int, longest: int) -> float:
    """Return 0 within [shortest, longest] tokens, else −((distance to the range) / (width of the range))², at least −1.

    Example: with a range of 30 to 80 a reply of 105 tokens gets −(25 / 50)² = −0.25
    """
    distance = max(shortest - length, length - longest, 0)
    return 0.0 - min(1.0, (distance / (longest - shortest)) ** 2)


def ended(turn: RuleInput) -> float | None:
    """Return -1 for a reply that was aborted, failed or was cut at the length limit.

    Otherwise it could get a better reward than a complete but poor reply.
    """
    return -1.0 if turn.state != "done" or turn.finish_reason == "length" else None


RULES: dict[str, Rule] = {"tool_outcome": tool_outcome, "length": length, "ended": ended}


def load_rule(name: str, *, allow_import: bool) -> Rule:
    """Load a rule: a built-in one, an entry point, or (if `allow_import`) `module:function`.

    Raises UnknownExtension. The import of a module may raise any exception.
    """
    if name in RULES:
        return RULES[name]
    if ":" in name and not allow_import:
        raise UnknownExtension(
            f"{name!r}: the rewards of a policy cannot name a module; only the deployment's settings can."
        )
    return extensions.load_function(name, ENTRY_POINTS, RULES, noun="rule")
