"""Corrections in token space: the tokens that the model would generate for a corrected text, and where they differ.

Nothing but the reply is tokenized: the prompt is the recorded one. What stands around the reply's text in its recorded
tokens, such as reasoning before it and the end-of-turn token after it, stands around the corrected text as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Protocol

from alignment.corrected_text import MAX_LENGTH_RATIO, TextRule, check_text
from alignment.types import CorrectedReply

EXTRA_TOKENS = 64  # that a text may have beyond MAX_LENGTH_RATIO times the reply's
MAX_ALIGNED = 4_000_000  # token comparisons; beyond, all tokens between the common beginning and end differ


class TextTokenizer(Protocol):
    """What is used of a tokenizer of transformers."""

    all_special_ids: list[int]
    eos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, clean_up_tokenization_spaces: bool) -> str: ...


@dataclass(frozen=True)
class CorrectionPair:
    """A correction with the tokens of its text, and which tokens of both sides differ from the other side."""

    correction: CorrectedReply
    chosen_ids: tuple[int, ...]
    chosen_differs: tuple[bool, ...]
    rejected_differs: tuple[bool, ...]


def make_pair(
    correction: CorrectedReply, tokenizer: TextTokenizer, num_ids: int, context_length: int | None = None
) -> CorrectionPair | TextRule:
    """Return the pair of a correction, or why its text cannot be learned from.

    The model has the token ids 0 to `num_ids` - 1. `context_length` is the most tokens of a prompt with its reply;
    None: unlimited.
    """
    sample = correction.sample
    if (rule := check_text(correction.reply, correction.text)) is not None:
        return rule
    special = set(tokenizer.all_special_ids)
    rejected = sample.output_ids
    num_end = next((n for n, id in enumerate(reversed(rejected)) if id not in special), len(rejected))
    body, end = list(rejected[: len(rejected) - num_end]), rejected[len(rejected) - num_end :]
    if not end and tokenizer.eos_token_id is not None and tokenizer.eos_token_id < num_ids:
        end = (tokenizer.eos_token_id,)  # the reply was cut off; the text is complete
    written = _decode(tokenizer, body)
    start = written.rfind(correction.reply)
    if start < 0:
        return TextRule.OTHER_TOKENS
    before = _prefix_ids(tokenizer, body, written[:start])
    if before is None:
        return TextRule.OTHER_TOKENS
    after = written[start + len(correction.reply) :]  # such as a stop string
    ids = tokenizer.encode(correction.text + after, add_special_tokens=False)
    if special.intersection(ids):
        return TextRule.SPECIAL_TOKENS
    chosen = (*before, *ids, *end)
    if max(chosen, default=0) >= num_ids:
        return TextRule.OTHER_TOKENS
    is_too_long = len(chosen) > MAX_LENGTH_RATIO * len(rejected) + EXTRA_TOKENS
    if is_too_long or (context_length is not None and len(sample.prompt_ids) + len(chosen) > context_length):
        return TextRule.TOO_LONG
    if chosen == rejected:
        return TextRule.SAME_TEXT
    return CorrectionPair(correction, chosen, *differing_tokens(chosen, rejected))


def differing_tokens(chosen: Sequence[int], rejected: Sequence[int]) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Return, for both sequences, which tokens differ from the other.

    Where one sequence has tokens that the other lacks, the other's next token stands against them: it was generated in
    their place. So tokens added at the end stand against the end-of-turn token.

    Example: (5, 6, 0) and (5, 0) give (False, True, False) and (False, True)
    """
    start = _common_length(chosen, rejected)
    end = _common_length(chosen[start:][::-1], rejected[start:][::-1])
    middle, other = chosen[start : len(chosen) - end], rejected[start : len(rejected) - end]
    spans = [(0, len(middle), 0, len(other))]
    if len(middle) * len(other) <= MAX_ALIGNED:
        opcodes = SequenceMatcher(None, middle, other, autojunk=False).get_opcodes()
        spans = [(a, b, c, d) for kind, a, b, c, d in opcodes if kind != "equal"]
    sides = ([False] * len(chosen), [False] * len(rejected))
    for first, last, other_first, other_last in spans:
        for flags, low, high in ((sides[0], first, last), (sides[1], other_first, other_last)):
            for index in range(start + low, min(start + max(high, low + 1), len(flags))):
                flags[index] = True
    return tuple(sides[0]), tuple(sides[1])


def _decode(tokenizer: TextTokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def _prefix_ids(tokenizer: TextTokenizer, ids: list[int], text: str) -> list[int] | None:
    """Return the first ids, whose text is `text`; None if it ends within a token."""
    low, high = 0, len(ids)
    while low < high:  # the text of a prefix grows with it
        middle = (low + high) // 2
        low, high = (middle + 1, high) if len(_decode(tokenizer, ids[:middle])) < len(text) else (low, middle)
    return ids[:low] if _decode(tokenizer, ids[:low]) == text else None


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
