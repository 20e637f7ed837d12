"""Thinking: the beginning of a reply between <think> and </think>, which this wire shows as a block of its own.

The tokens stay those of one reply. A block that a client sends back becomes the same text again, so that the next
prompt begins with the recorded tokens. The empty line behind </think> goes to the end of the block, not to the
beginning of the text: clients drop texts of white space.
"""

from collections.abc import Iterator
from typing import Literal

OPENING, CLOSING, GAP = "<think>", "</think>", "\n\n"
Kind = Literal["thinking", "text"]
Piece = tuple[Kind, str]  # a part of a reply


def to_reply_text(thinking: str) -> str:
    """Return the beginning of the reply that a block of thinking was read from."""
    if thinking.endswith(GAP):
        return f"{OPENING}{thinking.removesuffix(GAP)}{CLOSING}{GAP}"
    return f"{OPENING}{thinking}{CLOSING}"


class ThinkingSplitter:
    """Splits a reply that arrives in parts into thinking and text. However it is cut, the result is the same.

    Call `add` for each part and `finish` at the end; each yields the pieces that are certain by then.
    """

    def __init__(self) -> None:
        self._step = self._open
        self._held = ""  # what may still be the beginning of a mark

    def add(self, part: str) -> Iterator[Piece]:
        self._held += part
        while self._held:
            before = self._step
            if (piece := self._step(False)) is not None:
                yield piece
            if self._step == before:
                return

    def finish(self) -> Iterator[Piece]:
        """Yield what was held back: no mark follows."""
        while self._held:
            if (piece := self._step(True)) is not None:
                yield piece

    def _take(self, kind: Kind, num_chars: int) -> Piece:
        taken, self._held = self._held[:num_chars], self._held[num_chars:]
        return kind, taken

    def _drop(self, num_chars: int) -> None:
        self._held = self._held[num_chars:]

    def _open(self, is_end: bool) -> Piece | None:
        if self._held.startswith(OPENING):
            self._drop(len(OPENING))
            self._step = self._think
            return "thinking", ""  # the block exists even if nothing is in it
        if is_end or not OPENING.startswith(self._held):
            self._step = self._write
        return None

    def _think(self, is_end: bool) -> Piece | None:
        if (end := self._held.find(CLOSING)) >= 0:
            piece = self._take("thinking", end)
            self._drop(len(CLOSING))
            self._step = self._close
            return piece
        return self._take("thinking", len(self._held) if is_end else len(self._held) - _overlap(self._held, CLOSING))

    def _close(self, is_end: bool) -> Piece | None:
        if not is_end and self._held != GAP and GAP.startswith(self._held):
            return None
        self._step = self._write
        return self._take("thinking", len(GAP)) if self._held.startswith(GAP) else None

    def _write(self, is_end: bool) -> Piece | None:
        return self._take("text", len(self._held))


def _overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of the text may be the beginning of the mark."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)
