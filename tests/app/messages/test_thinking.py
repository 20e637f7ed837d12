"""Thinking is split from a reply and joined to it again, without a change to the reply."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.messages.thinking import ThinkingSplitter, to_reply_text

# Parts of marks, of what stands around them, and of words.
PARTS = st.lists(st.sampled_from(["<think>", "</think>", "<", "th", "</", "ink>", "\n", "\n\n", "a", " b", ">"]))


def split(parts: list[str]) -> list[tuple[str, str]]:
    """Return the blocks: pieces of one kind that follow each other are one."""
    splitter, blocks = ThinkingSplitter(), list[tuple[str, str]]()
    pieces = [piece for part in parts for piece in splitter.add(part)] + list(splitter.finish())
    for kind, text in pieces:
        if blocks and blocks[-1][0] == kind:
            blocks[-1] = kind, blocks[-1][1] + text
        else:
            blocks.append((kind, text))
    return blocks


@pytest.mark.parametrize(
    ("reply", "blocks"),
    [
        ("Hi", [("text", "Hi")]),
        ("<think>\nA\n</think>\n\nHi", [("thinking", "\nA\n\n\n"), ("text", "Hi")]),
        ("<think>A</think>\n\nHi", [("thinking", "A\n\n"), ("text", "Hi")]),
        ("<think>A</think>Hi", [("thinking", "A"), ("text", "Hi")]),
        ("<think>A</think>\nHi", [("thinking", "A"), ("text", "\nHi")]),
        ("<think></think>Hi", [("thinking", ""), ("text", "Hi")]),
        ("<think>\nA\n</think>\n\n", [("thinking", "\nA\n\n\n")]),
        ("<thin", [("text", "<thin")]),
        (" <think>A</think>", [("text", " <think>A</think>")]),
        ("<think>A</th", [("thinking", "A</th")]),
        ("A</think>\n\nHi", [("text", "A</think>\n\nHi")]),
        ("", []),
    ],
)
def test_beginning_of_a_reply_is_thinking(reply: str, blocks: list[tuple[str, str]]) -> None:
    assert split([reply]) == split(list(reply)) == blocks


@given(PARTS)
def test_result_is_the_same_however_a_reply_is_cut(parts: list[str]) -> None:
    assert split(parts) == split(["".join(parts)]) == split(list("".join(parts)))


@given(PARTS)
def test_blocks_sent_back_are_the_reply(parts: list[str]) -> None:
    reply = "".join(parts)
    blocks = split([reply])
    joined = "".join(to_reply_text(text) if kind == "thinking" else text for kind, text in blocks)
    thinking = blocks[0][1] if blocks and blocks[0][0] == "thinking" else ""
    is_cut = bool(thinking or reply.startswith("<think>")) and "</think>" not in reply
    is_ambiguous = thinking.endswith("\n\n") and "</think>\n\n" not in reply  # the gap stood before the mark
    assert joined == (reply + "</think>" if is_cut and not is_ambiguous else reply) or is_ambiguous
