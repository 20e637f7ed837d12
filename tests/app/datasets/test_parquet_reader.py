"""The Parquet reader: errors name the row and the column, and malicious files cannot exhaust memory."""

import io
import random
import subprocess
import sys
import tempfile
from typing import Any

import orjson
import pyarrow as pa  # type: ignore[import-untyped]
import pytest

from app.core.errors import BadRequest
from app.datasets import imports, parquet_reader
from app.datasets.parquet_reader import InvalidFile
from tests.support.parquet_files import to_parquet

NONE = pa.array([], pa.string())


def message(content: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": content}


def preference(**changed: object) -> bytes:
    return to_parquet({"prompt": ["a", "Hi"], "chosen": ["b", "Hello!"], "rejected": ["c", "What?"]} | changed)


@pytest.mark.parametrize(
    ("file", "column", "message_part"),
    [
        (preference(prompt=["a", None]), "prompt", "Row 1, column 'prompt': there is no value"),
        (preference(prompt=["a", " "]), "prompt", "Row 1, column 'prompt': the text is empty"),
        (preference(prompt=[1, 2]), "prompt", "must hold text or lists of {role, content}, not int64"),
        (preference(prompt=[["a"], ["b"]]), "prompt", "must hold text or lists of {role, content}"),
        (preference(prompt=[[message("a")], []]), "prompt", "the list of messages is empty"),
        (preference(prompt=[[message("a")], [None]]), "prompt", "message 0 is missing"),
        (preference(prompt=[[message("a")], [message("b", "robot")]]), "prompt", "role that is none of user"),
        (preference(prompt=[[message("a")], [message("")]]), "prompt", "message 0 has no content"),
        (preference(prompt=[[message("a")], [message("b") | {"image": "x"}]]), "prompt", "cannot be stored: 'image'"),
        (preference(chosen=["b", "a\x00b"]), "chosen", "Row 1, column 'chosen': the text has a NUL"),
        (preference(chosen=[[message("b", "assistant")], [message("Hello!")]]), "chosen", "must be the assistant's"),
        (preference(rejected=["c", "Hello!"]), "rejected", "Row 1: 'chosen' and 'rejected' are the same"),
        (preference(**{"a\x00b": [1, 2]}), None, "NUL"),
        (preference(prompt=["a", "x" * 1_100_000]), None, "Row 1 holds more than"),
        (to_parquet({"prompt": ["a"], "chosen": ["b"]}), "rejected", "There is no column 'rejected'"),
        (to_parquet({"prompt": [], "chosen": [], "rejected": []}), "prompt", "must hold text"),
        (to_parquet({"prompt": NONE, "chosen": NONE, "rejected": NONE}), None, "The file has 0 rows"),
        (preference().replace(b"PAR1", b"PAR2"), None, "not a Parquet file"),
        (preference()[:-20], None, "not a Parquet file"),
        (preference()[100:], None, "not a Parquet file"),
        (b"", None, "not a Parquet file"),
        (b"PAR1" * 3, None, "not a Parquet file"),
        (b"{}" * 5000, None, "not a Parquet file"),
    ],
)
def test_invalid_file_is_refused_by_row_and_column(file: bytes, column: str | None, message_part: str) -> None:
    result = read_file(file)
    assert result["column"] == column
    assert message_part in result["error"]


def read_file(file: bytes, kind: str = "preferences") -> dict[str, Any]:
    try:
        return parquet_reader.convert(kind, io.BytesIO(file), io.BytesIO(), 10_000_000)
    except InvalidFile as error:
        return {"error": str(error), "column": error.column}
    except (pa.ArrowException, OSError, ValueError):
        return {"error": "not a Parquet file", "column": None}


@pytest.mark.parametrize(
    ("values", "stored"),
    [
        ([1.5, float("nan")], [1.5, None]),
        ([float("-inf"), float("inf")], [None, None]),
        (pa.array([1.5, float("nan")], pa.float32()), [1.5, None]),
        (pa.array([1.5, float("inf")], pa.float16()), [1.5, None]),
        (pa.array([float("nan"), 2.5]).dictionary_encode(), [None, 2.5]),
        (["x", "a\x00b"], ["x", None]),
        (["x" * 1_100_000, "y"], [None, "y"]),
        ([2**63 - 1, None], [2**63 - 1, None]),
    ],
)
def test_value_of_an_optional_column_that_cannot_be_stored_is_left_out_and_counted(
    values: list[Any], stored: list[Any]
) -> None:
    target = io.BytesIO()
    file = io.BytesIO(preference(score=values, id=[7, 8]))
    result = parquet_reader.convert("preferences", file, target, 10_000_000)
    details = [orjson.loads(line)["details"] for line in target.getvalue().splitlines()]
    assert [one.get("score") for one in details] == stored and [one["id"] for one in details] == [7, 8]
    written = values.to_pylist() if isinstance(values, pa.Array) else values
    num_left_out = sum(value is not None and one is None for value, one in zip(written, stored, strict=True))
    assert result["values_left_out"] == ({"score": num_left_out} if num_left_out else {})


# A small process starts the reader: a child of this process would count this process's memory in its peak.
MEASURED = """
import resource, subprocess, sys
done = subprocess.run([sys.executable, *sys.argv[1:]])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)
sys.exit(done.returncode)
"""


def read_in_subprocess(file: bytes, kind: str = "prompts") -> tuple[int, dict[str, object], int]:
    """Read the file as an import does; return the exit code, the result and the peak memory in bytes."""
    command = [sys.executable, "-c", MEASURED, "-m", "app.datasets.parquet_reader", kind, str(10_000_000)]
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as rows:
        source.write(file)
        source.seek(0)
        done = subprocess.run(command, stdin=source, stdout=rows, stderr=subprocess.PIPE, timeout=300)
    *_, result, peak = done.stderr.splitlines()
    return done.returncode, orjson.loads(result), int(peak) * 1024


def test_decompression_bomb_is_refused_in_bounded_memory() -> None:
    indices, values = pa.array([0] * 300_000, pa.int32()), pa.array(["x" * 4_000_000])
    bomb = to_parquet({"prompt": pa.DictionaryArray.from_arrays(indices, values)}, compression="zstd")
    assert len(bomb) < 10_000
    code, result, peak = read_in_subprocess(bomb)
    assert (code, "too much memory" in str(result["error"])) == (0, True)
    assert peak < 1.5 * parquet_reader.MEMORY_BYTES


def test_deeply_nested_column_is_refused() -> None:
    kind = pa.string()
    for _ in range(60):
        kind = pa.list_(kind)
    code, result, _ = read_in_subprocess(to_parquet({"prompt": pa.array([None], kind)}))
    assert (code, "error" in result) == (0, True)


@pytest.mark.parametrize("seed", range(8))
def test_corrupted_file_is_read_or_refused(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        file = bytearray(preference(prompt=[[message("a")], [message("b")]]))
        for _ in range(rng.choice([1, 2, 5, 20])):
            file[rng.randrange(len(file))] = rng.randrange(256)
        read_file(bytes(file))  # any other exception fails the test


@pytest.mark.parametrize("stderr", [b"", b"\n", b"terminate called\nAborted\n", b"null", b'{"rows": 1}', b"[]", b"7"])
async def test_crashed_reader_is_a_bad_request(stderr: bytes) -> None:
    with pytest.raises(BadRequest):
        imports._parse_result(stderr)
