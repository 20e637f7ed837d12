"""Validates the rows of an imported Parquet file. Errors name the row's number and the column."""

import math
from collections.abc import Mapping
from typing import Any

import orjson

ROLES = ("user", "assistant", "system", "tool")
MAX_ROW_BYTES = 1024 * 1024
Messages = list[dict[str, str]]


class InvalidFile(Exception):
    """A file that cannot be imported: the message says why, and `column` where, if one column is the cause."""

    def __init__(self, message: str, column: str | None = None) -> None:
        super().__init__(message)
        self.column = column


class InvalidValue(Exception):
    """A value that cannot be imported. The caller adds the row and the column."""


def convert_row(kind: str, row: Mapping[str, Any], number: int) -> bytes:
    """Return the row as JSON. Raises InvalidFile.

    Example: {"prompt": "Hi", "reference": "Oh"} -> {"messages": [{…}], "reference": "Oh"}
    """
    content: dict[str, Any] = {"messages": _read_at(number, "prompt", read_messages, row["prompt"], "user")}
    rest = {name: value for name, value in row.items() if name != "prompt"}
    if kind == "preferences":
        content |= _read_preference(content["messages"], rest.pop("chosen"), rest.pop("rejected"), number)
    elif rest.get("reference") is not None:
        content["reference"] = _read_at(number, "reference", check_text, rest.pop("reference"))
    details = {name: _read_at(number, name, check_scalar, value) for name, value in rest.items() if value is not None}
    if details:
        content["details"] = details
    line = orjson.dumps(content)
    if len(line) > MAX_ROW_BYTES:
        raise InvalidFile(f"Row {number} holds more than {MAX_ROW_BYTES} bytes.")
    return line


def _read_preference(prompt: Messages, chosen: Any, rejected: Any, number: int) -> dict[str, Messages]:
    chosen_messages = _read_at(number, "chosen", read_answer, chosen, prompt)
    rejected_messages = _read_at(number, "rejected", read_answer, rejected, prompt)
    if chosen_messages == rejected_messages:
        raise InvalidFile(f"Row {number}: 'chosen' and 'rejected' are the same, so neither is preferred.", "rejected")
    return {"chosen": chosen_messages, "rejected": rejected_messages}


def _read_at(number: int, column: str, read: Any, *values: Any) -> Any:
    try:
        return read(*values)
    except InvalidValue as error:
        raise InvalidFile(f"Row {number}, column '{column}': {error}.", column) from error


def read_messages(value: Any, role: str) -> Messages:
    """Return the messages of a column: text is one message of `role`, a list is read message by message."""
    if value is None:
        raise InvalidValue("there is no value")
    if isinstance(value, str):
        if not value.strip():
            raise InvalidValue("the text is empty")
        return [{"role": role, "content": check_text(value)}]
    if not value:
        raise InvalidValue("the list of messages is empty")
    return [_read_message(message, index) for index, message in enumerate(value)]


def read_answer(value: Any, prompt: Messages) -> Messages:
    """Return the messages of a reply, without the prompt that some datasets repeat in front of it."""
    messages = read_messages(value, "assistant")
    if len(messages) > len(prompt) and messages[: len(prompt)] == prompt:
        messages = messages[len(prompt) :]
    if messages[-1]["role"] != "assistant":
        raise InvalidValue("the last message must be the assistant's")
    return messages


def _read_message(message: Any, index: int) -> dict[str, str]:
    if message is None:
        raise InvalidValue(f"message {index} is missing")
    role, content = message["role"], message["content"]
    if role not in ROLES:
        raise InvalidValue(f"message {index} has a role that is none of {', '.join(ROLES)}")
    if content is None or not (content or role == "assistant"):
        raise InvalidValue(f"message {index} has no content")
    for name, value in message.items():
        if name not in ("role", "content") and value not in (None, [], {}, ""):
            raise InvalidValue(f"message {index} has a field that cannot be stored: '{name}'")
    return {"role": role, "content": check_text(content)}


def check_text(value: str) -> str:
    if "\x00" in value:
        raise InvalidValue("the text has a NUL character, which cannot be stored")
    return value


def check_scalar(value: str | int | float) -> str | int | float:
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidValue(f"{value} is not a finite number")
    return check_text(value) if isinstance(value, str) else value
