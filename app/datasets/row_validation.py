"""A row of somebody's Parquet file → what a dataset keeps. Refused with the row's number and the column's name."""

import math
from collections.abc import Mapping
from typing import Any

import orjson

ROLES = ("user", "assistant", "system", "tool")
MAX_ROW_BYTES = 1024 * 1024
Said = list[dict[str, str]]


class Refused(Exception):
    """What is wrong with the file, as a sentence, and the column it is about."""

    def __init__(self, message: str, column: str | None = None) -> None:
        super().__init__(message)
        self.column = column


class Wrong(Exception):
    """What is wrong with one value; who reads the row knows where it is."""


def content(kind: str, row: Mapping[str, Any], number: int) -> bytes:
    """The row as JSON. Example: {"prompt": "Hi", "reference": "Oh"} -> {"messages": [{…}], "reference": "Oh"}"""
    kept: dict[str, Any] = {"messages": _at(number, "prompt", said, row["prompt"], "user")}
    rest = {name: value for name, value in row.items() if name != "prompt"}
    if kind == "preferences":
        kept |= _preference(kept["messages"], rest.pop("chosen"), rest.pop("rejected"), number)
    elif rest.get("reference") is not None:
        kept["reference"] = _at(number, "reference", text, rest.pop("reference"))
    details = {name: _at(number, name, scalar, value) for name, value in rest.items() if value is not None}
    if details:
        kept["details"] = details
    written = orjson.dumps(kept)
    if len(written) > MAX_ROW_BYTES:
        raise Refused(f"Row {number} holds more than {MAX_ROW_BYTES} bytes.")
    return written


def _preference(prompt: Said, chosen: Any, rejected: Any, number: int) -> dict[str, Said]:
    better = _at(number, "chosen", answer, chosen, prompt)
    worse = _at(number, "rejected", answer, rejected, prompt)
    if better == worse:
        raise Refused(f"Row {number}: 'chosen' and 'rejected' are the same, which prefers nothing.", "rejected")
    return {"chosen": better, "rejected": worse}


def _at(number: int, column: str, read: Any, *values: Any) -> Any:
    try:
        return read(*values)
    except Wrong as error:
        raise Refused(f"Row {number}, column '{column}': {error}.", column) from error


def said(value: Any, role: str) -> Said:
    """Text is one message of `role`; a list is read message by message."""
    if value is None:
        raise Wrong("there is no value")
    if isinstance(value, str):
        if not value.strip():
            raise Wrong("the text is empty")
        return [{"role": role, "content": text(value)}]
    if not value:
        raise Wrong("the list of messages is empty")
    return [_message(message, index) for index, message in enumerate(value)]


def answer(value: Any, prompt: Said) -> Said:
    """Some data sets repeat the prompt in front of each answer: it is taken off."""
    messages = said(value, "assistant")
    if len(messages) > len(prompt) and messages[: len(prompt)] == prompt:
        messages = messages[len(prompt) :]
    if messages[-1]["role"] != "assistant":
        raise Wrong("the last message must be the assistant's")
    return messages


def _message(message: Any, index: int) -> dict[str, str]:
    if message is None:
        raise Wrong(f"message {index} is missing")
    role, words = message["role"], message["content"]
    if role not in ROLES:
        raise Wrong(f"message {index} has a role that is none of {', '.join(ROLES)}")
    if words is None or not (words or role == "assistant"):
        raise Wrong(f"message {index} has no content")
    for name, value in message.items():
        if name not in ("role", "content") and value not in (None, [], {}, ""):
            raise Wrong(f"message {index} has a field that cannot be kept: '{name}'")
    return {"role": role, "content": text(words)}


def text(value: str) -> str:
    if "\x00" in value:
        raise Wrong("the text holds a NUL character, which cannot be stored")
    return value


def scalar(value: str | int | float) -> str | int | float:
    if isinstance(value, float) and not math.isfinite(value):
        raise Wrong(f"{value} is not a finite number")
    return text(value) if isinstance(value, str) else value
