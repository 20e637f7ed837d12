"""/v1/exports and /v1/datasets: export and import of Parquet files."""

import os
import tempfile
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict, replace
from functools import partial
from typing import Annotated, Any, Literal
from urllib.parse import quote

import pyarrow as pa  # type: ignore[import-untyped]
from fastapi import APIRouter, Depends, Path, Query, Request
from pydantic import BaseModel, ConfigDict
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response

from app.core.database import Database
from app.core.errors import ERROR_RESPONSES, require_row
from app.core.http import services_of, settings_of
from app.core.pagination import Page
from app.datasets import imports, preference_pairs, removal, turn_rows
from app.datasets.parquet_writer import MEDIA_TYPE, ParquetResponse, ParquetWriter
from app.datasets.turn_rows import ExportFilter
from app.models import AuditAction, Dataset, DatasetKind, new_id, record_audit
from app.policies import repository as policies
from app.projects.auth import (
    AdminCaller,
    Caller,
    ContentCaller,
    DatabaseDep,
    LongRunningDatabaseDep,
    OperatingCaller,
    ViewingCaller,
    limits_of,
)

router = APIRouter(prefix="/v1", tags=["datasets"], responses=ERROR_RESPONSES)

BINARY = {"schema": {"type": "string", "format": "binary"}}
PARQUET_RESPONSE: dict[int | str, dict[str, Any]] = {200: {"description": "Parquet", "content": {MEDIA_TYPE: BINARY}}}
PARQUET_BODY = {"requestBody": {"required": True, "content": {MEDIA_TYPE: BINARY}}}
PolicyName = Annotated[str | None, Query(min_length=1, max_length=63)]
UnixTime = Annotated[float | None, Query(ge=0, le=1e12, allow_inf_nan=False, description="Unix seconds")]
Id = Annotated[str, Path(min_length=1, max_length=64)]
Limit = Annotated[int, Query(ge=1, le=100)]


class DatasetView(BaseModel):
    model_config = ConfigDict(from_attributes=True)

    object: Literal["dataset"] = "dataset"
    id: str
    name: str
    kind: DatasetKind
    num_rows: int
    sha256: str
    created_at: float


class DatasetList(Page[DatasetView]):
    pass


class RowView(BaseModel):
    """Prompts have `messages` and may have a `reference`; preferences have `messages`, `chosen` and `rejected`."""

    object: Literal["dataset.row"] = "dataset.row"
    number: int
    messages: list[dict[str, Any]]
    chosen: list[dict[str, Any]] | None = None
    rejected: list[dict[str, Any]] | None = None
    reference: str | None = None
    details: dict[str, Any] = {}


class RowList(BaseModel):
    """`last_number` is the `after` of the next page."""

    object: Literal["list"] = "list"
    data: list[RowView]
    last_number: int | None
    has_more: bool


class DatasetDeleted(BaseModel):
    object: Literal["dataset.deleted"] = "dataset.deleted"
    id: str
    deleted: bool = True


async def parse_export_filter(
    caller: AdminCaller,
    db: LongRunningDatabaseDep,
    policy: PolicyName = None,
    since: UnixTime = None,
    until: UnixTime = None,
) -> ExportFilter:
    """Return which rows of the caller's project are exported. Raises NotFound for an unknown policy."""
    policy_id = None
    if policy is not None:
        async with db.read() as session:
            row = await policies.find_policy(session, caller.project_id, policy)
        policy_id = require_row(row, f"There is no policy named '{policy}'.", param="policy").id
    return ExportFilter(caller.project_id, policy_id, since=since, until=until)


ExportFilterDep = Annotated[ExportFilter, Depends(parse_export_filter)]


@router.get("/exports/turns", response_class=Response, responses=PARQUET_RESPONSE)
async def export_turns(
    request: Request,
    caller: AdminCaller,
    db: LongRunningDatabaseDep,
    export_filter: ExportFilterDep,
    policy: PolicyName = None,
    version: Annotated[int | None, Query(ge=0, le=2**31 - 1)] = None,
    trainable: bool | None = None,
    with_feedback: bool | None = None,
) -> Response:
    """Export every turn that is not deleted, oldest first, with its feedback."""
    export_filter = replace(export_filter, version=version, trainable=trainable, with_feedback=with_feedback)
    await _audit_export(db, caller, AuditAction.TURNS_EXPORTED, policy, export_filter)
    pages = turn_rows.read_pages(db, export_filter)
    return await _download(request, "turns.parquet", turn_rows.TURNS_SCHEMA, pages)


@router.get("/exports/preferences", response_class=Response, responses=PARQUET_RESPONSE)
async def export_preferences(
    request: Request,
    caller: AdminCaller,
    db: LongRunningDatabaseDep,
    export_filter: ExportFilterDep,
    policy: PolicyName = None,
) -> Response:
    """Export pairs of replies to the same messages, from effective comparisons, rankings and corrections."""
    await _audit_export(db, caller, AuditAction.PREFERENCES_EXPORTED, policy, export_filter)
    pages = preference_pairs.read_pages(db, export_filter)
    return await _download(request, "preferences.parquet", preference_pairs.PREFERENCES_SCHEMA, pages)


async def _audit_export(
    db: Database, caller: Caller, action: AuditAction, policy: str | None, export_filter: ExportFilter
) -> None:
    """Record an export before its first row is read. The entry names the policy, or the project for all policies."""
    ids = ("project_id", "policy_id")
    details = {name: value for name, value in asdict(export_filter).items() if value is not None and name not in ids}
    async with db.write() as session:
        project_id = caller.project_id
        record_audit(session, caller.key_prefix, action, policy or project_id, project_id=project_id, **details)


async def _download(request: Request, name: str, schema: pa.Schema, pages: AsyncGenerator[Any]) -> Response:
    """Write the pages of rows to a file and return it, or what is written when the client disconnects."""
    writer = ParquetWriter(settings_of(request).home, schema)
    try:
        async with aclosing(pages):
            async for rows in pages:
                await writer.add(rows)
                if await request.is_disconnected():
                    break
        await writer.finish()
        return ParquetResponse(writer, name)
    except BaseException:
        writer.close()
        raise


@router.post(
    "/datasets",
    status_code=201,
    responses={200: {"model": DatasetView, "description": "This file was imported before."}},
    openapi_extra=PARQUET_BODY,
)
async def import_dataset(
    request: Request,
    response: Response,
    caller: OperatingCaller,
    db: LongRunningDatabaseDep,
    name: Annotated[str, Query(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")],
    kind: DatasetKind,
) -> DatasetView:
    """Import the Parquet file in the body. It is checked completely before anything is stored. Idempotent.

    Columns that are neither text nor numbers are left out and named in the header `x-columns-left-out`. Values of
    optional columns that cannot be stored (NaN, infinity, NUL characters, or what makes a row too large) are left out
    and counted in `x-values-left-out`, as `column=count`.
    """
    settings = settings_of(request)
    settings.home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=settings.home) as file, tempfile.TemporaryFile(dir=settings.home) as rows:
        sha256 = await imports.receive_file(request, file, settings.server.max_import_bytes)
        async with db.read() as session:
            existing = await imports.find_same_file(session, caller.project_id, name, kind, sha256)
        if existing is None:
            async with services_of(request).get(imports.ReaderSlots):
                parsed = await imports.parse_file(kind, file, rows, settings.server.max_import_bytes)
            if parsed.left_out:
                response.headers["x-columns-left-out"] = ",".join(quote(name, safe="") for name in parsed.left_out)
            if parsed.values_left_out:
                counts = sorted(parsed.values_left_out.items())
                response.headers["x-values-left-out"] = ",".join(f"{quote(name, safe='')}={n}" for name, n in counts)
            dataset = Dataset(
                id=new_id("ds"),
                project_id=caller.project_id,
                name=name,
                kind=kind,
                sha256=sha256,
                num_rows=parsed.rows,
                num_bytes=os.fstat(file.fileno()).st_size,
            )
            audit = partial(_audit_dataset, caller=caller, action=AuditAction.DATASET_IMPORTED, dataset=dataset)
            limit = limits_of(request, caller).dataset_bytes
            stored = await imports.store_dataset(db, dataset, rows, limit, audit)
            existing = None if stored.id == dataset.id else stored
    if existing is not None:
        response.status_code = 200
    return DatasetView.model_validate(existing or stored)


@router.get("/datasets")
async def list_datasets(
    caller: ViewingCaller,
    db: DatabaseDep,
    limit: Limit = 20,
    after: Annotated[str | None, Query(min_length=1, max_length=64, description="a dataset's id")] = None,
) -> DatasetList:
    """Return the project's datasets, the newest first."""
    async with db.read() as session:
        rows = await imports.list_datasets(session, caller.project_id, after, limit)
    return DatasetList.from_rows([DatasetView.model_validate(row) for row in rows], limit)


@router.get("/datasets/{id}")
async def get_dataset(id: Id, caller: ViewingCaller, db: DatabaseDep) -> DatasetView:
    async with db.read() as session:
        return DatasetView.model_validate(await imports.get_dataset(session, caller.project_id, id))


@router.get("/datasets/{id}/rows")
async def dataset_rows(
    id: Id,
    caller: ContentCaller,
    db: DatabaseDep,
    limit: Limit = 20,
    after: Annotated[int | None, Query(ge=0, le=2**31 - 1, description="a row's number")] = None,
) -> RowList:
    """Return the dataset's rows, by number."""
    async with db.read() as session:
        dataset = await imports.get_dataset(session, caller.project_id, id)
        rows = await imports.list_rows(session, dataset, after, limit)
    data = [RowView(number=row.row_number, **row.content) for row in rows[:limit]]
    return RowList(data=data, last_number=data[-1].number if data else None, has_more=len(rows) > limit)


@router.delete("/datasets/{id}")
async def delete_dataset(id: Id, caller: OperatingCaller, db: LongRunningDatabaseDep) -> DatasetDeleted:
    """Delete the dataset with its rows."""
    async with db.write() as session:
        dataset = await imports.get_dataset(session, caller.project_id, id)
        _audit_dataset(session, caller, AuditAction.DATASET_DELETED, dataset)
        removal.hide(dataset)
    await removal.try_remove_hidden(db)
    return DatasetDeleted(id=id)


def _audit_dataset(session: AsyncSession, caller: Caller, action: AuditAction, dataset: Dataset) -> None:
    details: dict[str, Any] = {"name": dataset.name, "kind": dataset.kind, "rows": dataset.num_rows}
    record_audit(session, caller.key_prefix, action, dataset.id, project_id=caller.project_id, **details)
