"""A user with a script: rules by what the assistant has written, and lines in order."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from alignment.environments.attempts import Attempt
from alignment.environments.protocols import Message
from alignment.environments.users.simulated_user import SimulatedUser, digest_of, text_of


class Rule(NamedTuple):
    """What the user answers to a reply that the pattern is found in, whatever its case; None ends the dialogue."""

    pattern: str
    answer: str | None


class ScriptedUser(SimulatedUser):
    """The first rule that applies decides. Where none does, the user says the next line.

    Example:
        ScriptedUser("A table, please.", rules=[Rule("how many", "Four."), Rule("booked", None)], otherwise="What?")

    Args:
        first: Its first message.
        lines: What it says where no rule applies, in this order.
        rules: What it answers.
        otherwise: What it says when it has no line left; None ends the dialogue.

    Raises ValueError if the pattern of a rule is no regular expression.
    """

    def __init__(
        self, first: str, *, lines: Sequence[str] = (), rules: Sequence[Rule] = (), otherwise: str | None = None
    ) -> None:
        self._first = first
        self._lines = lines
        self._rules = [(_compile(rule.pattern), rule.answer) for rule in rules]
        self._otherwise = otherwise
        self._num_lines = 0  # so far
        self._sha256 = digest_of(first, [*lines], [(rule.pattern, rule.answer) for rule in rules], otherwise)

    def describe(self) -> Mapping[str, str]:
        return {"user": "scripted", "user_sha256": self._sha256}

    async def begin(self, attempt: Attempt) -> str:
        return self._first

    async def reply(self, messages: Sequence[Message]) -> str | None:
        text = text_of(messages[-1])
        for pattern, answer in self._rules:
            if pattern.search(text):
                return answer
        if self._num_lines == len(self._lines):
            return self._otherwise
        self._num_lines += 1
        return self._lines[self._num_lines - 1]


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise ValueError(f"the pattern {pattern!r} of a rule is no regular expression: {error}") from error
