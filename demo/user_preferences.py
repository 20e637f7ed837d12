"""The hidden taste of the shoppers: right, polite and brief. Read from the text alone; no model."""

import re
from dataclasses import dataclass

from demo.shop import INTENTS, Question

SHORTEST, LONGEST = 30, 80  # tokens of a brief reply, both allowed

# Whoever asks for a price is misled by any other price beside the right one; so with hours, durations and stock.
_FAMILIES = (
    re.compile(r"\b\d+ euros?\b"),
    re.compile(r"\b\d+ [ap]m\b|\bclosed\b"),
    re.compile(r"\b\d+ (?:minute|hour|day|week)s?\b"),
    re.compile(r"\bin stock\b|\bsold out\b|\bon order\b"),
)
_COURTESY = re.compile(r"\b(?:thanks|thank you|please|happy to|glad|gladly|welcome|my pleasure|of course)\b")


@dataclass(frozen=True)
class Verdict:
    right: bool
    polite: bool
    brief: bool

    @property
    def approved(self) -> bool:
        return self.right and self.polite and self.brief


def judge(question: Question, reply_text: str, num_tokens: int) -> Verdict:
    """What the shopper who asked the question thinks of the reply, which is num_tokens long."""
    reply = reply_text.lower()
    return Verdict(
        right=states_the_facts(question, reply) and not contradicts(question, reply),
        polite=_COURTESY.search(reply) is not None,
        brief=SHORTEST <= num_tokens <= LONGEST,
    )


def states_the_facts(question: Question, reply: str) -> bool:
    return all(_says(fact, reply) for fact in question.facts)


def contradicts(question: Question, reply: str) -> bool:
    """Another value of the same kind as a fact, or an answer about another thing than the one asked for."""
    for family in _FAMILIES:
        if any(family.fullmatch(fact) for fact in question.facts) and set(family.findall(reply)) - set(question.facts):
            return True
    others = (value for value in INTENTS[question.intent].values if value != question.subject)
    return any(_says(other.lower(), reply) for other in others)


def _says(words: str, reply: str) -> bool:
    return re.search(rf"\b{re.escape(words)}\b", reply) is not None
