"""/v1/exports and /v1/datasets: export and import of Parquet files."""

import tempfile
from collections.abc import Awaitable, Callable
from typing import Annotated, Any
from urllib.parse import quote

import orjson
from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from app.core.database import Database
from app.core.errors import ERROR_RESPONSES, NotFound
from app.core.services import services_of, settings_of
from app.datasets import preference_pairs, repository, turn_rows, upload
from app.datasets.parquet_writer import MEDIA_TYPE, ParquetResponse, ParquetWriter
from app.datasets.repository import ExportFilter
from app.datasets.schemas import DatasetDeleted, DatasetList, DatasetView, RowList
from app.models import Dataset, DatasetKind
from app.policies import repository as policies
from app.projects.auth import AdminCaller, Caller, DatabaseDep, UnboundedDatabaseDep

router = APIRouter(prefix="/v1", tags=["datasets"], responses=ERROR_RESPONSES)

BINARY = {"schema": {"type": "string", "format": "binary"}}
PARQUET_RESPONSE: dict[int | str, dict[str, Any]] = {200: {"description": "Parquet", "content": {MEDIA_TYPE: BINARY}}}
PARQUET_BODY = {"requestBody": {"required": True, "content": {MEDIA_TYPE: BINARY}}}
PolicyName = Annotated[str | None, Query(min_length=1, max_length=63)]
UnixTime = Annotated[float | None, Query(ge=0, le=1e12, allow_inf_nan=False, description="Unix seconds")]
Id = Annotated[str, Path(min_length=1, max_length=64)]
Limit = Annotated[int, Query(ge=1, le=100)]


@router.get("/exports/turns", response_class=Response, responses=PARQUET_RESPONSE)
async def export_turns(
    request: Request,
    caller: AdminCaller,
    db: UnboundedDatabaseDep,
    policy: PolicyName = None,
    version: Annotated[int | None, Query(ge=0, le=2**31 - 1)] = None,
    since: UnixTime = None,
    until: UnixTime = None,
    trainable: bool | None = None,
    with_feedback: bool | None = None,
) -> Response:
    """Export every turn that is not deleted, oldest first, with its feedback."""
    export_filter = ExportFilter(
        caller.project_id, await _policy_id(db, caller, policy), version, since, until, trainable, with_feedback
    )
    writer = ParquetWriter(settings_of(request).home, turn_rows.TURNS_SCHEMA)
    return await _download(
        writer, "turns.parquet", lambda: turn_rows.write_turns(db, export_filter, writer, request.is_disconnected)
    )


@router.get("/exports/preferences", response_class=Response, responses=PARQUET_RESPONSE)
async def export_preferences(
    request: Request,
    caller: AdminCaller,
    db: UnboundedDatabaseDep,
    policy: PolicyName = None,
    since: UnixTime = None,
    until: UnixTime = None,
) -> Response:
    """Export pairs of replies to the same messages, from effective comparisons, rankings and corrections."""
    export_filter = ExportFilter(caller.project_id, await _policy_id(db, caller, policy), since=since, until=until)
    writer = ParquetWriter(settings_of(request).home, preference_pairs.PREFERENCES_SCHEMA)
    return await _download(
        writer,
        "preferences.parquet",
        lambda: preference_pairs.write_pairs(db, export_filter, writer, request.is_disconnected),
    )


async def _download(writer: ParquetWriter, name: str, write_rows: Callable[[], Awaitable[None]]) -> Response:
    try:
        await write_rows()
        return ParquetResponse(await writer.finish(), name)
    except BaseException:
        writer.close()
        raise


async def _policy_id(db: Database, caller: Caller, name: str | None) -> str | None:
    if name is None:
        return None
    async with db.read() as session:
        policy = await policies.find_policy(session, caller.project_id, name)
    if policy is None:
        raise NotFound(f"There is no policy named '{name}'.", param="policy")
    return policy.id


@router.post(
    "/datasets",
    status_code=201,
    response_model=DatasetView,
    responses={200: {"model": DatasetView, "description": "This file was imported before."}},
    openapi_extra=PARQUET_BODY,
)
async def import_dataset(
    request: Request,
    caller: AdminCaller,
    db: UnboundedDatabaseDep,
    name: Annotated[str, Query(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")],
    kind: DatasetKind,
) -> Response:
    """Import the Parquet file in the body. It is checked completely before anything is stored. Idempotent."""
    settings = settings_of(request)
    settings.home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=settings.home) as file, tempfile.TemporaryFile(dir=settings.home) as rows:
        sha256 = await upload.receive_file(request, file, settings.max_import_bytes)
        async with db.read() as session:
            existing = await repository.find_same_file(session, caller.project_id, name, kind, sha256)
        if existing is not None:
            return _dataset_response(existing, 200)
        async with services_of(request).get(upload.ReaderSlots):
            parsed = await upload.parse_file(kind, file, rows, settings.max_import_bytes)
        dataset = repository.new_dataset(caller.project_id, name, kind, sha256, parsed.num_rows)
        async with db.write() as session:
            existing = await repository.store_dataset(session, dataset, upload.read_chunks(rows))
        return _dataset_response(existing or dataset, 200 if existing else 201, parsed.left_out)


def _dataset_response(dataset: Dataset, status: int, left_out: list[str] | None = None) -> Response:
    headers = {"x-columns-left-out": ",".join(quote(name, safe="") for name in left_out)} if left_out else {}
    view = DatasetView.of(dataset).model_dump(mode="json")
    return Response(orjson.dumps(view), status, headers, media_type="application/json")


@router.get("/datasets")
async def list_datasets(
    caller: AdminCaller,
    db: DatabaseDep,
    limit: Limit = 20,
    after: Annotated[str | None, Query(min_length=1, max_length=64, description="a dataset's id")] = None,
) -> DatasetList:
    """Return the project's datasets, the newest first."""
    async with db.read() as session:
        return DatasetList.of(await repository.list_datasets(session, caller.project_id, after, limit), limit)


@router.get("/datasets/{id}")
async def get_dataset(id: Id, caller: AdminCaller, db: DatabaseDep) -> DatasetView:
    async with db.read() as session:
        return DatasetView.of(await repository.get_dataset(session, caller.project_id, id))


@router.get("/datasets/{id}/rows")
async def dataset_rows(
    id: Id,
    caller: AdminCaller,
    db: DatabaseDep,
    limit: Limit = 20,
    after: Annotated[int | None, Query(ge=0, le=2**31 - 1, description="a row's number")] = None,
) -> RowList:
    """Return the dataset's rows, by number."""
    async with db.read() as session:
        dataset = await repository.get_dataset(session, caller.project_id, id)
        return RowList.of(await repository.list_rows(session, dataset, after, limit), limit)


@router.delete("/datasets/{id}")
async def delete_dataset(id: Id, caller: AdminCaller, db: UnboundedDatabaseDep) -> DatasetDeleted:
    """Delete the dataset with its rows."""
    async with db.write() as session:
        await repository.delete_dataset(session, caller.project_id, id)
    return DatasetDeleted(id=id)
