"""Parquet → JSON lines, in a process of its own with limited memory and time: `python -m app.datasets.parquet_reader`.

A malicious file may crash its reader, for example with a page that unpacks to gigabytes or with a false length. Here
it can only crash this process. The file is stdin, the rows go to stdout, and the last line of stderr is the result:
{"rows": 3, "left_out": ["embedding"]} or {"error": "Row 2, …", "column": "chosen"}.
"""

import os
import resource
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO

import orjson
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from pyarrow import types

from app.datasets.row_validation import InvalidFile, convert_row

MAX_ROWS = 2_000_000
MAX_COLUMNS = 256
BATCH_BYTES = 8 * 1024 * 1024
MEMORY_BYTES = 1024 * 1024 * 1024
CPU_SECONDS = 600
REQUIRED = {"prompts": ("prompt",), "preferences": ("prompt", "chosen", "rejected")}


def convert(kind: str, source: BinaryIO, target: BinaryIO, max_bytes: int) -> dict[str, Any]:
    """Write every row as a line. Raises InvalidFile. No metadata of the file is trusted before it is checked."""
    file = pq.ParquetFile(source, pre_buffer=False, buffer_size=1024 * 1024, arrow_extensions_enabled=False)
    columns, left_out = _columns(kind, file.schema_arrow)
    if not 0 < file.metadata.num_rows <= MAX_ROWS:
        raise InvalidFile(f"The file has {file.metadata.num_rows} rows; a dataset has 1 to {MAX_ROWS}.")
    number = num_bytes = 0
    for row in _rows(file, columns):
        line = convert_row(kind, row, number)
        num_bytes += len(line)
        if num_bytes > max_bytes:
            raise InvalidFile(f"The rows hold more than {max_bytes} bytes once unpacked.")
        target.write(line + b"\n")
        number += 1
    target.flush()
    return {"rows": number, "left_out": left_out}


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
    if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
        return False
    message = kind.value_type
    if not types.is_struct(message):
        return False
    fields = [message.field(index) for index in range(message.num_fields)]
    texts = [field.name for field in fields if _is_text(field.type)]
    return texts.count("role") == 1 == texts.count("content") and len({f.name for f in fields}) == len(fields)


def _rows(file: pq.ParquetFile, columns: list[str]) -> Iterator[dict[str, Any]]:
    for group in range(file.metadata.num_row_groups):
        metadata = file.metadata.row_group(group)
        row_bytes = max(1, metadata.total_byte_size // max(1, metadata.num_rows))
        size = max(1, min(1024, BATCH_BYTES // row_bytes))
        for batch in file.iter_batches(size, row_groups=[group], columns=columns, use_threads=False):
            values = {name: batch.column(name).to_pylist() for name in columns}
            for index in range(batch.num_rows):
                yield {name: values[name][index] for name in columns}


def main(kind: str, max_bytes: str) -> int:
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
    return 0


def _first_line(error: Exception) -> str:
    line = (str(error).splitlines() or [type(error).__name__])[0][:200]
    return line.encode("utf-8", "replace").decode().replace("\x00", "�").rstrip(".") + "."


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
