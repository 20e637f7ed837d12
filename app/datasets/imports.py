"""Imported datasets: a Parquet file is received on disk, checked by a process of its own, and only then stored."""

import asyncio
import hashlib
import logging
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

import orjson
from sqlalchemy import insert, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.requests import ClientDisconnect, Request

from app.core.errors import BadRequest, Conflict, require_row
from app.core.http import stream_body
from app.core.pagination import apply_keyset
from app.core.settings import REPOSITORY
from app.models import Dataset, DatasetRow

log = logging.getLogger("attune.datasets")
CHUNK_BYTES = 512 * 1024  # of rows that are inserted together
MAX_UNPACK_RATIO = 4  # size of the unpacked rows, relative to the largest file allowed
TIMEOUT_SECONDS = 900.0
MAX_READERS = 2


@dataclass(frozen=True)
class ParsedFile:
    """What a reader says of a file: the number of its rows, and the columns that a dataset cannot store."""

    rows: int
    left_out: list[str]


async def receive_file(request: Request, file: IO[bytes], limit: int) -> str:
    """Write the request's body to `file` and return its SHA-256. Raises TooLarge as soon as the limit is exceeded."""
    digest = hashlib.sha256()
    try:
        async for chunk in stream_body(request, limit, "file"):
            digest.update(chunk)
            await asyncio.to_thread(file.write, chunk)
    except ClientDisconnect as error:
        raise BadRequest("The upload was interrupted.") from error
    await asyncio.to_thread(file.flush)
    return digest.hexdigest()


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
            return ParsedFile(**result)
    except (orjson.JSONDecodeError, TypeError) as error:
        log.warning("a Parquet reader crashed: %s", stderr[-2000:].decode(errors="replace"))
        raise BadRequest("The file is not a Parquet file that can be read.", code="invalid_parquet") from error
    raise BadRequest(result["error"], param=result.get("column"), code="invalid_parquet")


async def find_same_file(session: AsyncSession, project_id: str, name: str, kind: str, sha256: str) -> Dataset | None:
    """Return the dataset that was imported from this file before. Raises Conflict for another file of that name."""
    dataset = await session.scalar(select(Dataset).where(Dataset.project_id == project_id, Dataset.name == name))
    if dataset is None or (dataset.sha256, dataset.kind) == (sha256, kind):
        return dataset
    raise Conflict(f"The dataset '{name}' exists already, from another file.", param="name", code="name_taken")


async def store_dataset(session: AsyncSession, dataset: Dataset, rows: IO[bytes]) -> Dataset | None:
    """Insert the dataset with the rows that `parse_file` wrote, and return None.

    If another request has taken the name meanwhile, that request's dataset is returned. Raises Conflict.
    """
    try:
        async with session.begin_nested():
            session.add(dataset)
    except IntegrityError:
        return await find_same_file(session, dataset.project_id, dataset.name, dataset.kind, dataset.sha256)
    rows.seek(0)
    number = 0
    while lines := await asyncio.to_thread(rows.readlines, CHUNK_BYTES):
        values = [
            {"dataset_id": dataset.id, "row_number": row_number, "content": orjson.loads(line)}
            for row_number, line in enumerate(lines, number)
        ]
        await session.execute(insert(DatasetRow), values)
        number += len(lines)
    return None


async def get_dataset(session: AsyncSession, project_id: str, id: str) -> Dataset:
    """Return the dataset. Raises NotFound."""
    dataset = await session.scalar(select(Dataset).where(Dataset.id == id, Dataset.project_id == project_id))
    return require_row(dataset, f"There is no dataset '{id}'.", param="id")


async def list_datasets(session: AsyncSession, project_id: str, after: str | None, limit: int) -> Sequence[Dataset]:
    """Return up to `limit + 1` datasets, the newest first."""
    last = None if after is None else await get_dataset(session, project_id, after)
    query = select(Dataset).where(Dataset.project_id == project_id)
    query = apply_keyset(query, (Dataset.created_at, Dataset.id), last, limit, descending=True)
    return (await session.scalars(query)).all()


async def list_rows(session: AsyncSession, dataset: Dataset, after: int | None, limit: int) -> Sequence[DatasetRow]:
    """Return up to `limit + 1` rows after the row number `after`."""
    query = select(DatasetRow).where(DatasetRow.dataset_id == dataset.id)
    query = apply_keyset(query, (DatasetRow.row_number,), None if after is None else (after,), limit)
    return (await session.scalars(query)).all()
