"""Parquet → JSON lines, in a process of its own with limited memory and time: `python -m app.datasets.parquet_reader`.

A malicious file may crash its reader, for example with a page that unpacks to gigabytes or with a false length. Here
it can only crash this process. The file is stdin, the rows go to stdout, and the last line of stderr is the result:
{"rows": 3, "left_out": ["embedding"], "values_left_out": {"score": 1}} or {"error": "Row 2, …", "column": "chosen"}.
"""

import math
import os
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import BinaryIO, ParamSpec, TypeVar

import orjson
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from pyarrow import types

MAX_ROWS = 2_000_000
MAX_COLUMNS = 256
MAX_ROW_BYTES = 1024 * 1024
BATCH_BYTES = 8 * 1024 * 1024
MEMORY_BYTES = 1024 * 1024 * 1024
CPU_SECONDS = 600
REQUIRED = {"prompts": ("prompt",), "preferences": ("prompt", "chosen", "rejected")}
ROLES = ("user", "assistant", "system", "tool")
Messages = list[dict[str, str]]
P = ParamSpec("P")
T = TypeVar("T")


class InvalidFile(Exception):
    """A file that cannot be imported: the message says why, and `column` where, if one column is the cause."""

    def __init__(self, message: str, column: str | None = None) -> None:
        super().__init__(message)
        self.column = column


class InvalidValue(Exception):
    """A value that cannot be imported. The caller adds the row and the column."""


def convert(kind: str, source: BinaryIO, target: BinaryIO, max_bytes: int) -> dict[str, object]:
    """Write every row as a line. Raises InvalidFile. No metadata of the file is trusted before it is checked."""
    file = pq.ParquetFile(source, pre_buffer=False, buffer_size=1024 * 1024, arrow_extensions_enabled=False)
    columns, left_out = _columns(kind, file.schema_arrow)
    if not 0 < file.metadata.num_rows <= MAX_ROWS:
        raise InvalidFile(f"The file has {file.metadata.num_rows} rows; a dataset has 1 to {MAX_ROWS}.")
    num_rows = num_bytes = 0
    values_left_out: Counter[str] = Counter()
    for num_rows, row in enumerate(_rows(file, columns), 1):
        line = convert_row(kind, row, num_rows - 1, values_left_out)
        num_bytes += len(line)
        if num_bytes > max_bytes:
            raise InvalidFile(f"The rows hold more than {max_bytes} bytes once unpacked.")
        target.write(line + b"\n")
    target.flush()
    return {"rows": num_rows, "left_out": left_out, "values_left_out": dict(values_left_out)}


def _columns(kind: str, schema: pa.Schema) -> tuple[list[str], list[str]]:
    """Return the columns to read, and those that a dataset cannot store."""
    if len(schema.names) > MAX_COLUMNS:
        raise InvalidFile(f"The file has {len(schema.names)} columns; {MAX_COLUMNS} are the most.")
    if len(set(schema.names)) < len(schema.names):
        raise InvalidFile("Two columns have the same name.")
    for name in schema.names:
        if "\x00" in name or len(name) > 255:
            raise InvalidFile("A column's name is longer than 255 characters, or holds a NUL character.")
    for name in REQUIRED[kind]:
        if name not in schema.names:
            raise InvalidFile(f"There is no column '{name}'.", name)
        column_type = schema.field(name).type
        if not (_is_text(column_type) or _is_messages(column_type)):
            raise InvalidFile(
                f"Column '{name}' must hold text or lists of {{role, content}}, not {str(column_type)[:80]}.", name
            )
    if kind == "prompts" and "reference" in schema.names and not _is_text(schema.field("reference").type):
        raise InvalidFile("Column 'reference' must hold text.", "reference")
    extra = [name for name in schema.names if name not in REQUIRED[kind]]
    plain = [name for name in extra if _is_text(schema.field(name).type) or _is_number(schema.field(name).type)]
    return [*REQUIRED[kind], *plain], [name for name in extra if name not in plain]


def _is_text(kind: pa.DataType) -> bool:
    if types.is_dictionary(kind):
        kind = kind.value_type
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _is_number(kind: pa.DataType) -> bool:
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _is_messages(kind: pa.DataType) -> bool:
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if not (is_list and types.is_struct(kind.value_type)):
        return False
    fields = {field.name: field.type for field in kind.value_type}
    has_texts = all(_is_text(fields.get(name, pa.null())) for name in ("role", "content"))
    return has_texts and len(fields) == kind.value_type.num_fields  # no two of the same name


def _rows(file: pq.ParquetFile, columns: list[str]) -> Iterator[dict[str, object]]:
    for group in range(file.metadata.num_row_groups):
        metadata = file.metadata.row_group(group)
        row_bytes = max(1, metadata.total_byte_size // max(1, metadata.num_rows))
        size = max(1, min(1024, BATCH_BYTES // row_bytes))
        for batch in file.iter_batches(size, row_groups=[group], columns=columns, use_threads=False):
            yield from batch.select(columns).to_pylist()


def convert_row(kind: str, row: Mapping[str, object], number: int, values_left_out: Counter[str]) -> bytes:
    """Return the row as JSON. Raises InvalidFile for a column that a dataset must have.

    A value of another column that cannot be stored is left out, as such a column is, and counted by its column.

    Example: {"prompt": "Hi", "reference": "Oh"} -> {"messages": [{…}], "reference": "Oh"}
    """
    prompt = _read_at(number, "prompt", read_messages, row["prompt"], "user")
    content: dict[str, object] = {"messages": prompt}
    rest = {name: value for name, value in row.items() if name != "prompt"}
    if kind == "preferences":
        content |= _read_preference(prompt, rest.pop("chosen"), rest.pop("rejected"), number)
    elif rest.get("reference") is not None:
        content["reference"] = _read_at(number, "reference", check_text, rest.pop("reference"))
    values = {name: value for name, value in rest.items() if value is not None}
    details = {name: value for name, value in values.items() if _is_storable(value)}
    line = _to_line(content, details)
    while len(line) > MAX_ROW_BYTES and details:
        del details[max(details, key=lambda name: len(str(details[name])))]
        line = _to_line(content, details)
    if len(line) > MAX_ROW_BYTES:
        raise InvalidFile(f"Row {number} holds more than {MAX_ROW_BYTES} bytes.")
    values_left_out.update(values.keys() - details.keys())
    return line


def _to_line(content: Mapping[str, object], details: Mapping[str, object]) -> bytes:
    return orjson.dumps({**content, "details": details} if details else content)


def _read_preference(prompt: Messages, chosen: object, rejected: object, number: int) -> dict[str, Messages]:
    chosen_messages = _read_at(number, "chosen", read_answer, chosen, prompt)
    rejected_messages = _read_at(number, "rejected", read_answer, rejected, prompt)
    if chosen_messages == rejected_messages:
        raise InvalidFile(f"Row {number}: 'chosen' and 'rejected' are the same, so neither is preferred.", "rejected")
    return {"chosen": chosen_messages, "rejected": rejected_messages}


def _read_at(number: int, column: str, read: Callable[P, T], *values: P.args, **options: P.kwargs) -> T:
    try:
        return read(*values, **options)
    except InvalidValue as error:
        raise InvalidFile(f"Row {number}, column '{column}': {error}.", column) from error


def read_messages(value: object, role: str) -> Messages:
    """Return the messages of a column: text is one message of `role`, a list is read message by message."""
    if value is None:
        raise InvalidValue("there is no value")
    if isinstance(value, str):
        if not value.strip():
            raise InvalidValue("the text is empty")
        return [{"role": role, "content": check_text(value)}]
    if not isinstance(value, list) or not value:
        raise InvalidValue("the list of messages is empty")
    return [_read_message(message, index) for index, message in enumerate(value)]


def read_answer(value: object, prompt: Messages) -> Messages:
    """Return the messages of a reply, without the prompt that some datasets repeat in front of it."""
    messages = read_messages(value, "assistant")
    if len(messages) > len(prompt) and messages[: len(prompt)] == prompt:
        messages = messages[len(prompt) :]
    if messages[-1]["role"] != "assistant":
        raise InvalidValue("the last message must be the assistant's")
    return messages


def _read_message(message: Mapping[str, object] | None, index: int) -> dict[str, str]:
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


def check_text(value: object) -> str:
    if not isinstance(value, str):
        raise InvalidValue("the value is no text")
    if "\x00" in value:
        raise InvalidValue("the text has a NUL character, which cannot be stored")
    return value


def _is_storable(value: object) -> bool:
    """Whether JSON and the database have the value: no NaN, no infinity, no text with a NUL character."""
    return "\x00" not in value if isinstance(value, str) else isinstance(value, int | float) and math.isfinite(value)


def main(kind: str, max_bytes: str) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pa.set_memory_pool(pa.system_memory_pool())  # the other pools reserve gigabytes of address space
    pa.set_cpu_count(1)
    try:
        result = convert(kind, sys.stdin.buffer, sys.stdout.buffer, int(max_bytes))
    except InvalidFile as error:
        result = {"error": str(error), "column": error.column}
    except MemoryError:
        result = {"error": "The file takes too much memory to read; write smaller row groups and pages."}
    except (pa.ArrowException, OSError, ValueError) as error:
        result = {"error": f"The file is not a Parquet file that can be read: {_first_line(error)}"}
    os.write(2, b"\n" + orjson.dumps(result) + b"\n")


def _first_line(error: Exception) -> str:
    line = (str(error).splitlines() or [type(error).__name__])[0][:200]
    return line.encode("utf-8", "replace").decode().replace("\x00", "�").rstrip(".") + "."


if __name__ == "__main__":
    main(*sys.argv[1:])
