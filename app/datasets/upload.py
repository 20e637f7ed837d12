"""A Parquet file comes in: to disk first, then checked whole by a process of its own, before a row is stored."""

import asyncio
import hashlib
import logging
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import IO, Any

import orjson
from starlette.requests import ClientDisconnect, Request

from app.core.errors import BadRequest, TooLarge
from app.core.settings import REPOSITORY

log = logging.getLogger("attune.exchange")
PIECE = 1024 * 1024
CHUNK_ROWS = 1000
CHUNK_BYTES = 8 * 1024 * 1024
SWELL = 4  # how many times larger than the largest file its rows may be once unpacked
SECONDS = 900.0
AT_ONCE = 2


@dataclass(frozen=True)
class Reading:
    num_rows: int
    left_out: list[str]


async def receive(request: Request, file: IO[bytes], limit: int) -> str:
    """Body → file. Returns its SHA-256; refused as soon as it is known to be too large."""
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > limit:
        raise TooLarge(f"The file may hold at most {limit} bytes.")
    digest, size, piece = hashlib.sha256(), 0, bytearray()
    try:
        async for bit in request.stream():
            size += len(bit)
            if size > limit:
                raise TooLarge(f"The file may hold at most {limit} bytes.")
            piece += bit
            if len(piece) >= PIECE:
                await asyncio.to_thread(_keep, file, digest, bytes(piece))
                piece.clear()
    except ClientDisconnect as error:
        raise BadRequest("The file broke off.") from error
    await asyncio.to_thread(_keep, file, digest, bytes(piece))
    return digest.hexdigest()


def _keep(file: IO[bytes], digest: Any, piece: bytes) -> None:
    digest.update(piece)
    file.write(piece)
    file.flush()


class ReaderSlots(asyncio.Semaphore):
    """Limits how many readers run at once in this process: each may take a gigabyte."""

    def __init__(self) -> None:
        super().__init__(AT_ONCE)


async def read(kind: str, file: IO[bytes], rows: IO[bytes], limit: int) -> Reading:
    """Every row of `file` as a line of JSON in `rows`, or BadRequest."""
    file.seek(0)
    reader = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "app.datasets.parquet_reader", kind, str(SWELL * limit)),
        stdin=file,
        stdout=rows,
        stderr=asyncio.subprocess.PIPE,
        cwd=REPOSITORY,
    )
    try:
        async with asyncio.timeout(SECONDS):
            _, told = await reader.communicate()
    except TimeoutError as error:
        raise BadRequest("The file took too long to read.", code="invalid_parquet") from error
    finally:
        if reader.returncode is None:
            reader.kill()
            await reader.wait()
    return _verdict(told)


def _verdict(told: bytes) -> Reading:
    try:
        verdict = orjson.loads(told.strip().rpartition(b"\n")[2] or b"null")
        if "refused" not in verdict:
            return Reading(verdict["rows"], verdict["left_out"])
    except (orjson.JSONDecodeError, TypeError, KeyError) as error:
        log.warning("a reader of Parquet died: %s", told[-2000:].decode(errors="replace"))
        raise BadRequest("The file is not a Parquet file that can be read.", code="invalid_parquet") from error
    raise BadRequest(verdict["refused"], param=verdict.get("column"), code="invalid_parquet")


async def chunks(rows: IO[bytes]) -> AsyncIterator[list[dict[str, Any]]]:
    """What `read` wrote, a bounded number of rows at a time."""
    rows.seek(0)
    while chunk := await asyncio.to_thread(_chunk, rows):
        yield chunk


def _chunk(rows: IO[bytes]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    size = 0
    while len(found) < CHUNK_ROWS and size < CHUNK_BYTES and (line := rows.readline()):
        size += len(line)
        found.append(orjson.loads(line))
    return found
