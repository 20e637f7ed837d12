"""Imported datasets: a Parquet file is received on disk, checked by a process of its own, and only then stored."""

import asyncio
import hashlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO

import orjson
from sqlalchemy import func, insert, select, update
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.requests import ClientDisconnect, Request

from app.core.compression import require_known_encoding
from app.core.database import Database, database_time, now
from app.core.errors import BadRequest, Conflict, Unavailable, require_row
from app.core.http import stream_body
from app.core.pagination import apply_keyset
from app.core.settings import REPOSITORY
from app.datasets import removal
from app.models import Dataset, DatasetRow

log = logging.getLogger("attune.datasets")
CHUNK_BYTES = 512 * 1024  # of rows that are inserted in one transaction
CHUNK_ROWS = 500  # likewise: however short they are
LEASE_SECONDS = 60.0  # from one chunk to the next
MAX_UNPACK_RATIO = 4  # size of the unpacked rows, relative to the largest file allowed
TIMEOUT_SECONDS = 900.0
MAX_READERS = 2
# The environment variables of a reader: it parses files of strangers, so it gets no database URL and no secret.
PASSED_VARIABLES = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "TMPDIR", "VIRTUAL_ENV")


@dataclass(frozen=True)
class ParsedFile:
    """What a reader says of a file: the number of its rows, and what of it a dataset cannot store.

    `left_out` are columns, `values_left_out` the numbers of values by column.
    """

    rows: int
    left_out: list[str]
    values_left_out: dict[str, int]


async def receive_file(request: Request, file: IO[bytes], limit: int) -> str:
    """Write the request's body to `file` and return its SHA-256.

    Raises TooLarge as soon as the limit is exceeded, and UnsupportedMediaType: Parquet is compressed itself.
    """
    require_known_encoding(request.headers.get("content-encoding", "").strip().lower(), ())
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
        env={name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ},
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


async def require_free_bytes(session: AsyncSession, dataset: Dataset, limit: int | None) -> None:
    """Raise Conflict if the project's datasets would have more bytes than it may have."""
    if limit is None:
        return
    in_project = Dataset.project_id == dataset.project_id
    used = int(await session.scalar(select(func.sum(Dataset.num_bytes)).where(in_project)) or 0)
    if used + (dataset.num_bytes or 0) > limit:
        message = (
            f"This file has {dataset.num_bytes} bytes. The datasets of this project have {used} bytes, and may have "
            f"{limit} (dataset_bytes); delete datasets that are not needed."
        )
        raise Conflict(message, code="project_limit")


async def store_dataset(
    db: Database, dataset: Dataset, rows: IO[bytes], limit: int | None, audit: Callable[[AsyncSession], None]
) -> Dataset:
    """Store the dataset with the rows that `parse_file` wrote, in short transactions, and return it.

    Nobody sees the dataset before the last transaction, which gives it its name and its entry in the audit log. If
    another request has taken the name meanwhile, that request's dataset is returned. Raises Conflict, Unavailable.
    """
    async with db.write() as session:
        await require_free_bytes(session, dataset, limit)
        values = {"name": dataset.id, "importing_until": now() + LEASE_SECONDS}
        columns = ("id", "project_id", "kind", "num_rows", "num_bytes", "sha256")
        session.add(Dataset(**{name: getattr(dataset, name) for name in columns}, **values))
    try:
        await _store_rows(db, dataset.id, rows)
        async with db.write() as session:
            stored = await _finish(session, dataset)
            if stored.id == dataset.id:
                audit(session)
    except BaseException:
        await _give_up(db, dataset.id)
        raise
    if stored.id != dataset.id:
        await _give_up(db, dataset.id)
    return stored


async def _store_rows(db: Database, dataset_id: str, rows: IO[bytes]) -> None:
    """Insert the rows, and renew the lease of the import with each chunk of them."""
    renew = update(Dataset).where(Dataset.id == dataset_id).values(importing_until=now() + LEASE_SECONDS)
    rows.seek(0)
    number = 0
    while lines := await asyncio.to_thread(rows.readlines, CHUNK_BYTES):
        for start in range(0, len(lines), CHUNK_ROWS):
            chunk = lines[start : start + CHUNK_ROWS]
            values = [
                {"dataset_id": dataset_id, "row_number": row_number, "content": orjson.loads(line)}
                for row_number, line in enumerate(chunk, number)
            ]
            async with db.write() as session:
                if (await session.execute(renew.returning(Dataset.id))).scalar() is None:
                    message = "The import took too long between two parts and was given up; send the file again."
                    raise Unavailable(message)
                await session.execute(insert(DatasetRow), values)
            number += len(chunk)
            await db.let_others_write()


async def _finish(session: AsyncSession, dataset: Dataset) -> Dataset:
    """Give the dataset its name, and return it; or return that of another request that has taken the name."""
    stored = await session.get(Dataset, dataset.id)
    if stored is None:
        raise Unavailable("The import took too long at its end and was given up; send the file again.")
    try:
        async with session.begin_nested():
            stored.name, stored.importing_until, stored.created_at = dataset.name, None, await database_time(session)
    except IntegrityError:
        same = await find_same_file(session, dataset.project_id, dataset.name, dataset.kind, dataset.sha256)
        return require_row(same, "The dataset that took the name was deleted; send the file again.", param="name")
    return stored


async def _give_up(db: Database, dataset_id: str) -> None:
    """Remove what an import has stored. If that fails, the reconciler does it when the lease has expired."""
    try:
        async with db.write() as session:
            await session.execute(update(Dataset).where(Dataset.id == dataset_id).values(importing_until=0.0))
    except SQLAlchemyError as error:
        log.warning("an import that failed was not removed yet: %s", error)
        return
    await removal.try_remove_hidden(db)


async def get_dataset(session: AsyncSession, project_id: str, id: str) -> Dataset:
    """Return the dataset. Raises NotFound."""
    is_own = (Dataset.id == id, Dataset.project_id == project_id, Dataset.importing_until.is_(None))
    dataset = await session.scalar(select(Dataset).where(*is_own))
    return require_row(dataset, f"There is no dataset '{id}'.", param="id")


async def list_datasets(session: AsyncSession, project_id: str, after: str | None, limit: int) -> Sequence[Dataset]:
    """Return up to `limit + 1` datasets, the newest first."""
    last = None if after is None else await get_dataset(session, project_id, after)
    query = select(Dataset).where(Dataset.project_id == project_id, Dataset.importing_until.is_(None))
    query = apply_keyset(query, (Dataset.created_at, Dataset.id), last, limit, descending=True)
    return (await session.scalars(query)).all()


async def list_rows(session: AsyncSession, dataset: Dataset, after: int | None, limit: int) -> Sequence[DatasetRow]:
    """Return up to `limit + 1` rows after the row number `after`."""
    query = select(DatasetRow).where(DatasetRow.dataset_id == dataset.id)
    query = apply_keyset(query, (DatasetRow.row_number,), None if after is None else (after,), limit)
    return (await session.scalars(query)).all()
