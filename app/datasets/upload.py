"""The upload of a Parquet file: to disk first, then checked by a process of its own, before any row is stored."""

import asyncio
import hashlib
import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import IO, Any

import orjson
from starlette.requests import ClientDisconnect, Request

from app.core.errors import BadRequest, TooLarge
from app.core.settings import REPOSITORY

log = logging.getLogger("attune.datasets")
WRITE_BYTES = 1024 * 1024
CHUNK_ROWS = 1000
CHUNK_BYTES = 8 * 1024 * 1024
MAX_UNPACK_RATIO = 4  # size of the unpacked rows, relative to the largest file allowed
TIMEOUT_SECONDS = 900.0
MAX_READERS = 2


@dataclass(frozen=True)
class ParsedFile:
    num_rows: int
    left_out: list[str]


async def receive_file(request: Request, file: IO[bytes], limit: int) -> str:
    """Write the request's body to `file` and return its SHA-256. Raises TooLarge as soon as the limit is exceeded."""
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > limit:
        raise TooLarge(f"The file may hold at most {limit} bytes.")
    digest, size, buffer = hashlib.sha256(), 0, bytearray()
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise TooLarge(f"The file may hold at most {limit} bytes.")
            buffer += chunk
            if len(buffer) >= WRITE_BYTES:
                await asyncio.to_thread(_write, file, digest, bytes(buffer))
                buffer.clear()
    except ClientDisconnect as error:
        raise BadRequest("The upload was interrupted.") from error
    await asyncio.to_thread(_write, file, digest, bytes(buffer))
    return digest.hexdigest()


def _write(file: IO[bytes], digest: Any, data: bytes) -> None:
    digest.update(data)
    file.write(data)
    file.flush()


class ReaderSlots(asyncio.Semaphore):
    """Limits how many readers run at the same time: each may use a gigabyte of memory."""

    def __init__(self) -> None:
        super().__init__(MAX_READERS)


async def parse_file(kind: str, file: IO[bytes], rows: IO[bytes], limit: int) -> ParsedFile:
    """Write every row of the Parquet `file` to `rows` as a line of JSON. Raises BadRequest."""
    file.seek(0)
    # Not asyncio's own: uvloop forks and runs Python in the child, which can crash in a process with threads.
    reader = subprocess.Popen(
        [sys.executable, "-m", "app.datasets.parquet_reader", kind, str(MAX_UNPACK_RATIO * limit)],
        stdin=file,
        stdout=rows,
        stderr=subprocess.PIPE,
        cwd=REPOSITORY,
    )
    try:
        _, stderr = await asyncio.to_thread(reader.communicate, timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise BadRequest("The file took too long to read.", code="invalid_parquet") from error
    finally:
        if reader.poll() is None:
            reader.kill()
            await asyncio.to_thread(reader.wait)
    return _parse_result(stderr)


def _parse_result(stderr: bytes) -> ParsedFile:
    try:
        result = orjson.loads(stderr.strip().rpartition(b"\n")[2] or b"null")
        if "error" not in result:
            return ParsedFile(result["rows"], result["left_out"])
    except (orjson.JSONDecodeError, TypeError, KeyError) as error:
        log.warning("a Parquet reader crashed: %s", stderr[-2000:].decode(errors="replace"))
        raise BadRequest("The file is not a Parquet file that can be read.", code="invalid_parquet") from error
    raise BadRequest(result["error"], param=result.get("column"), code="invalid_parquet")


async def read_chunks(rows: IO[bytes]) -> AsyncIterator[list[dict[str, Any]]]:
    """Yield the rows that `parse_file` wrote, in chunks of limited size."""
    rows.seek(0)
    while chunk := await asyncio.to_thread(_read_chunk, rows):
        yield chunk


def _read_chunk(rows: IO[bytes]) -> list[dict[str, Any]]:
    chunk: list[dict[str, Any]] = []
    size = 0
    while len(chunk) < CHUNK_ROWS and size < CHUNK_BYTES and (line := rows.readline()):
        size += len(line)
        chunk.append(orjson.loads(line))
    return chunk
