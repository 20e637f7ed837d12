"""Replies in four styles: helpful, rambling, curt and evasive.

Users approve only of the helpful style. A reply is composed of short sentences, so that every question has thousands
of replies in each style. The style is visible in the first few words.
"""

import re
from collections.abc import Callable
from random import Random
from typing import Any

from demo.shop import TEXTS, Question

_TEXTS: dict[str, Any] = TEXTS["replies"]


def helpful(rng: Random, question: Question) -> str:
    detail = rng.choice(_TEXTS["details"][_TEXTS["detail_of"][question.intent]])
    return " ".join((_choose(rng, "openers"), _answer_sentence(rng, question), detail, _choose(rng, "closings")))


def rambling(rng: Random, question: Question) -> str:
    before, after = rng.choice(((1, 2), (1, 3), (2, 1), (2, 2)))
    stories = rng.sample(_TEXTS["digressions"], before + after)
    core = _answer_sentence(rng, question)
    return " ".join((_choose(rng, "musings"), *stories[:before], core, *stories[before:], _choose(rng, "wandering")))


def curt(rng: Random, question: Question) -> str:
    bare = _TEXTS["short_answers"].get(_template_key(question), "{1}.").format(question.subject, *question.facts)
    answer = rng.choice((bare[0].upper() + bare[1:], _answer_sentence(rng, question)))
    return f"{answer} {_choose(rng, 'shrugs')}".strip().replace(", so please pick any other day", "")


def evasive(rng: Random, question: Question) -> str:
    return " ".join((_choose(rng, "evasions"), *rng.sample(_TEXTS["excuses"], 3), _choose(rng, "partings")))


def _choose(rng: Random, name: str) -> str:
    return rng.choice(_TEXTS[name])


def _answer_sentence(rng: Random, question: Question) -> str:
    return rng.choice(_TEXTS["answers"][_template_key(question)]).format(question.subject, *question.facts)


def _template_key(question: Question) -> str:
    return "closed" if question.facts == ("closed",) else question.intent


REPLY_STYLES: dict[str, Callable[[Random, Question], str]] = {
    "helpful": helpful,
    "rambling": rambling,
    "curt": curt,
    "evasive": evasive,
}
# Bounds on the number of words, digits and punctuation marks in a reply. The tokenizer needs few more tokens than that,
# so a helpful reply has 30 to 80 tokens, which counts as brief, and a rambling reply has more.
_LENGTH_BOUNDS = {"helpful": (34, 60), "rambling": (86, 104), "curt": (2, 22), "evasive": (35, 60)}


def reply(rng: Random, question: Question, style: str) -> str:
    """Return a random reply in this style, of the style's length."""
    shortest, longest = _LENGTH_BOUNDS[style]
    while True:
        text = REPLY_STYLES[style](rng, question)
        if shortest <= len(re.findall(r"[A-Za-z]+|\d|[^\w\s]", text)) <= longest:
            return text
