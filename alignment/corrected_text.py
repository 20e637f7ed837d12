"""Which corrected texts can be learned from, as far as the texts alone tell."""

import re
from enum import StrEnum

# A text may be so many times as long as the reply that it replaces, and so many characters longer.
MAX_LENGTH_RATIO = 3
EXTRA_CHARACTERS = 256


class TextRule(StrEnum):
    """Why the text of a correction is not learned from. The reply's reward is learned from nevertheless."""

    WHOLE_CONVERSATION = "whole_conversation"  # it corrects no single reply
    NOT_TEXT = "not_text"  # the reply calls tools, or has no text
    SAME_TEXT = "same_text"  # but for white space
    TOO_LONG = "too_long"
    SPECIAL_TOKENS = "special_tokens"  # it has marks of the chat template
    OTHER_TOKENS = "other_tokens"  # the reply's text cannot be found in its recorded tokens
    TOO_MANY = "too_many"  # corrections of one reply


def check_text(reply: str, text: str) -> TextRule | None:
    """Return why a corrected text cannot be learned from, as far as the texts alone tell; None if it can."""
    if not reply.strip():
        return TextRule.NOT_TEXT
    if _words(reply) == _words(text):
        return TextRule.SAME_TEXT
    return TextRule.TOO_LONG if len(text) > MAX_LENGTH_RATIO * len(reply) + EXTRA_CHARACTERS else None


def _words(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()
