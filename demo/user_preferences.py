"""The hidden preferences of the simulated users: correct, polite and brief replies. Checked by regular expressions."""

import re
from dataclasses import dataclass

from demo.shop import INTENTS, Question

MIN_BRIEF_TOKENS, MAX_BRIEF_TOKENS = 30, 80  # inclusive

# A reply that states the correct price and another price is misleading; likewise hours, durations and stock.
_FACT_PATTERNS = (
    re.compile(r"\b\d+ euros?\b"),
    re.compile(r"\b\d+ [ap]m\b|\bclosed\b"),
    re.compile(r"\b\d+ (?:minute|hour|day|week)s?\b"),
    re.compile(r"\bin stock\b|\bsold out\b|\bon order\b"),
)
_COURTESY_PATTERN = re.compile(r"\b(?:thanks|thank you|please|happy to|glad|gladly|welcome|my pleasure|of course)\b")


@dataclass(frozen=True)
class Verdict:
    correct: bool
    polite: bool
    brief: bool

    @property
    def approved(self) -> bool:
        return self.correct and self.polite and self.brief


def judge(question: Question, reply_text: str, num_tokens: int) -> Verdict:
    """Return what the user who asked the question thinks of a reply of `num_tokens` tokens."""
    reply = reply_text.lower()
    return Verdict(
        correct=states_facts(question, reply) and not contradicts(question, reply),
        polite=_COURTESY_PATTERN.search(reply) is not None,
        brief=MIN_BRIEF_TOKENS <= num_tokens <= MAX_BRIEF_TOKENS,
    )


def states_facts(question: Question, reply: str) -> bool:
    return all(_contains_phrase(fact, reply) for fact in question.facts)


def contradicts(question: Question, reply: str) -> bool:
    """Return whether the reply states another value of the same kind as a fact, or is about another thing."""
    for family in _FACT_PATTERNS:
        if any(family.fullmatch(fact) for fact in question.facts) and set(family.findall(reply)) - set(question.facts):
            return True
    others = (value for value in INTENTS[question.intent].values if value != question.subject)
    return any(_contains_phrase(other.lower(), reply) for other in others)


def _contains_phrase(words: str, reply: str) -> bool:
    return re.search(rf"\b{re.escape(words)}\b", reply) is not None
