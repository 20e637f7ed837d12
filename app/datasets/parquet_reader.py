"""Parquet → lines of JSON, in a process of its own with bounded memory and time: `python -m app.datasets.parquet_reader`.

A file from outside may be built to break its reader: a page that swells to gigabytes, a length that lies. What that
takes down here is this process, and nobody else's request. The file is stdin, the rows go to stdout, and the last line
of stderr is the verdict: {"rows": 3, "left_out": ["embedding"]} or {"refused": "Row 2, …", "column": "chosen"}.
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

from app.datasets.row_validation import Refused, content

MAX_ROWS = 2_000_000
MAX_COLUMNS = 256
BATCH_BYTES = 8 * 1024 * 1024
MEMORY_BYTES = 1024 * 1024 * 1024
CPU_SECONDS = 600
REQUIRED = {"prompts": ("prompt",), "preferences": ("prompt", "chosen", "rejected")}


def convert(kind: str, source: BinaryIO, target: BinaryIO, most_bytes: int) -> dict[str, Any]:
    """Write every row as a line, or raise Refused. Nothing of the file is believed before it is looked at."""
    file = pq.ParquetFile(source, pre_buffer=False, buffer_size=1024 * 1024, arrow_extensions_enabled=False)
    columns, left_out = _columns(kind, file.schema_arrow)
    if not 0 < file.metadata.num_rows <= MAX_ROWS:
        raise Refused(f"The file has {file.metadata.num_rows} rows; a dataset has 1 to {MAX_ROWS}.")
    number = written = 0
    for row in _rows(file, columns):
        line = content(kind, row, number)
        written += len(line)
        if written > most_bytes:
            raise Refused(f"The rows hold more than {most_bytes} bytes once unpacked.")
        target.write(line + b"\n")
        number += 1
    target.flush()
    return {"rows": number, "left_out": left_out}


def _columns(kind: str, schema: pa.Schema) -> tuple[list[str], list[str]]:
    """The columns to read, and those that a dataset cannot keep."""
    if len(schema.names) > MAX_COLUMNS:
        raise Refused(f"The file has {len(schema.names)} columns; {MAX_COLUMNS} are the most.")
    if len(set(schema.names)) < len(schema.names):
        raise Refused("Two columns have the same name.")
    for name in schema.names:
        if "\x00" in name or len(name) > 255:
            raise Refused("A column's name is longer than 255 characters, or holds a NUL character.")
    for name in REQUIRED[kind]:
        if name not in schema.names:
            raise Refused(f"There is no column '{name}'.", name)
        kept = schema.field(name).type
        if not (_is_text(kept) or _is_messages(kept)):
            raise Refused(f"Column '{name}' must hold text or lists of {{role, content}}, not {str(kept)[:80]}.", name)
    if kind == "prompts" and "reference" in schema.names and not _is_text(schema.field("reference").type):
        raise Refused("Column 'reference' must hold text.", "reference")
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
        told = file.metadata.row_group(group)
        each = max(1, told.total_byte_size // max(1, told.num_rows))
        size = max(1, min(1024, BATCH_BYTES // each))
        for batch in file.iter_batches(size, row_groups=[group], columns=columns, use_threads=False):
            values = {name: batch.column(name).to_pylist() for name in columns}
            for index in range(batch.num_rows):
                yield {name: values[name][index] for name in columns}


def main(kind: str, most_bytes: str) -> int:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pa.set_memory_pool(pa.system_memory_pool())  # the others set gigabytes of addresses aside
    pa.set_cpu_count(1)
    try:
        verdict = convert(kind, sys.stdin.buffer, sys.stdout.buffer, int(most_bytes))
    except Refused as error:
        verdict = {"refused": str(error), "column": error.column}
    except MemoryError:
        verdict = {"refused": "The file takes too much memory to read; write smaller row groups and pages."}
    except (pa.ArrowException, OSError, ValueError) as error:
        verdict = {"refused": f"The file is not a Parquet file that can be read: {_first_line(error)}"}
    os.write(2, b"\n" + orjson.dumps(verdict) + b"\n")
    return 0


def _first_line(error: Exception) -> str:
    line = (str(error).splitlines() or [type(error).__name__])[0][:200]
    return line.encode("utf-8", "replace").decode().replace("\x00", "�").rstrip(".") + "."


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
