"""Parse tool calls that are written as `<tool_call>{"name": …, "arguments": …}</tool_call>`, piece by piece.

SGLang parses a streamed reply by another parser than a whole one, and neither keeps a call that was cut. This one
parses both: what it returns for a text does not depend on the pieces that the text arrives in.
"""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field

OPEN, CLOSE = "<tool_call>", "</tool_call>"
LINE_CLOSE = "\n" + CLOSE  # ends a call even within a string, which holds no line break in JSON
HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\<]*)"\s*,\s*"(?:arguments|parameters)"\s*:')
NAME = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\<]*)"')


@dataclass
class CallPart:
    """A part of a call: its name first, then its arguments as the model wrote them."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass
class Parsed:
    """What a piece of text added to the reply."""

    content: str = ""
    calls: list[CallPart] = field(default_factory=list)


class ArgumentScanner:
    """Finds the end of one JSON value."""

    def __init__(self) -> None:
        self.in_string = False
        self._depth = 0
        self._is_escaped = False
        self._first = ""

    def accept(self, char: str) -> tuple[bool, bool]:
        """Return whether the character belongs to the value, and whether the value is complete with or before it."""
        if not self._first:
            if char.isspace():
                return False, False
            self._first = char
            self.in_string = char == '"'
            self._depth = 1 if char in '{["' else 0
            return True, False
        if self.in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self.in_string = False
                self._depth -= self._first == '"'
            return True, self._depth == 0
        if self._depth == 0:  # a number or a word
            return (False, True) if char in ",}]" or char.isspace() else (True, False)
        if char == '"':
            self.in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        return True, self._depth == 0


class CallParser:
    """Call `feed` for each piece of a reply, then `finish`.

    names: Of the functions that may be called; a call of another one stays text.
    is_forced: The reply must begin with a call, so that a cut `<tool_c` is no text.
    """

    def __init__(self, names: Collection[str], *, is_forced: bool = False) -> None:
        self._names = names
        self._is_forced = is_forced
        self._buffer = ""
        self._step = self._read_text
        self._scanner = ArgumentScanner()
        self._space = ""  # before the tag whose head is read; part of the text if the tag begins no call
        self._num_calls = 0
        self.cut_index: int | None = None  # of the call that the end of the reply has cut

    def feed(self, text: str) -> Parsed:
        self._buffer += text
        parsed = Parsed()
        while self._step(parsed):
            pass
        return parsed

    def finish(self) -> Parsed:
        """Return what was held back, and the name of a call that was cut before its arguments."""
        parsed, rest = Parsed(), self._buffer
        self._buffer = ""
        if self._step == self._read_text:
            # Held back are the beginning of a tag, or white space.
            is_markup = self._is_forced if rest.strip() else self._num_calls > 0
            parsed.content = "" if is_markup else rest
        elif self._step == self._read_head:
            self._finish_head(rest, parsed)
        elif self._step == self._read_arguments:
            self.cut_index = self._num_calls - 1
        return parsed

    def _finish_head(self, block: str, parsed: Parsed) -> None:
        if self._add_whole_call(block, parsed):
            return
        named = NAME.match(block)
        if named is not None and named[1] in self._names:
            self._open_call(named[1], parsed)
            self.cut_index = self._num_calls - 1

    def _read_text(self, parsed: Parsed) -> bool:
        """Pass on text up to the next call. White space beside a call is not part of the text."""
        before, marker, after = self._buffer.partition(OPEN)
        if marker:
            text = before.rstrip()
            parsed.content += text
            self._space = before[len(text) :]
            self._buffer, self._step = after, self._read_head
            return True
        held = held_length(self._buffer, OPEN)
        text = self._buffer[: len(self._buffer) - held].rstrip()
        parsed.content += text
        self._buffer = self._buffer[len(text) :]
        return False

    def _read_head(self, parsed: Parsed) -> bool:
        head = HEAD.match(self._buffer)
        if head is not None and head[1] in self._names:
            self._open_call(head[1], parsed)
            self._scanner = ArgumentScanner()
            self._buffer, self._step = self._buffer[head.end() :], self._read_arguments
            return True
        begun = self._buffer.lstrip()
        if begun and not begun.startswith("{"):  # the tag is only mentioned
            parsed.content += self._space + OPEN
            self._step = self._read_text
            return True
        block, marker, after = self._buffer.partition(CLOSE)
        if marker:  # the arguments before the name, no arguments, an unknown name, or no JSON
            if not self._add_whole_call(block, parsed):
                parsed.content += self._space + OPEN + block + CLOSE
            self._buffer, self._step = after, self._read_text
            return True
        return False

    def _read_arguments(self, parsed: Parsed) -> bool:
        scanner, position, arguments = self._scanner, 0, ""
        is_complete = is_held = False
        while position < len(self._buffer) and not is_complete:
            rest = self._buffer[position : position + len(LINE_CLOSE)]
            ends = (LINE_CLOSE,) if scanner.in_string else (LINE_CLOSE, CLOSE)
            if rest.startswith(ends):
                self._step = self._read_rest
                break
            if len(rest) < len(LINE_CLOSE) and any(end.startswith(rest) for end in ends):
                is_held = True
                break
            belongs, is_complete = scanner.accept(self._buffer[position])
            if belongs:
                arguments += self._buffer[position]
            if belongs or not is_complete:
                position += 1
        if arguments:
            parsed.calls.append(CallPart(self._num_calls - 1, arguments=arguments))
        self._buffer = self._buffer[position:]
        if is_complete:
            self._step = self._read_rest
        return not is_held and self._step == self._read_rest

    def _read_rest(self, parsed: Parsed) -> bool:
        """Skip the end of a call: its last brace, and fields after the arguments."""
        for marker in sorted((OPEN, CLOSE), key=lambda marker: self._buffer.find(marker) % (len(self._buffer) + 1)):
            if marker in self._buffer:
                _, _, self._buffer = self._buffer.partition(marker)
                self._step = self._read_text if marker == CLOSE else self._read_head
                return True
        return False

    def _open_call(self, name: str, parsed: Parsed) -> None:
        parsed.calls.append(CallPart(self._num_calls, name=name))
        self._num_calls += 1

    def _add_whole_call(self, block: str, parsed: Parsed) -> bool:
        """Add the call of a complete block, whose fields may have any order. Return whether it is one."""
        try:
            call = json.loads(block)
        except (ValueError, RecursionError):
            return False
        if not isinstance(call, dict) or call.get("name") not in self._names:
            return False
        arguments = call.get("arguments", call.get("parameters"))
        self._open_call(call["name"], parsed)
        text = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
        parsed.calls.append(CallPart(self._num_calls - 1, arguments=text))
        return True


def held_length(text: str, marker: str) -> int:
    """Return the length of the longest end of the text with which the marker begins."""
    return next((size for size in range(min(len(text), len(marker) - 1), 0, -1) if marker.startswith(text[-size:])), 0)
