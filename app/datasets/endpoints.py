"""/v1/exports and /v1/datasets: Parquet out, Parquet in."""

import tempfile
from collections.abc import Awaitable, Callable
from typing import Annotated, Any
from urllib.parse import quote

import orjson
from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from app.core.database import Database
from app.core.errors import DOCUMENTED, NotFound
from app.core.services import services_of, settings_of
from app.datasets import columns, preference_pairs, service, turn_rows, upload
from app.datasets.parquet_writer import MEDIA_TYPE, ParquetResponse, ParquetWriter
from app.datasets.repository import Wanted
from app.datasets.schemas import DatasetDeleted, DatasetList, DatasetView, RowList
from app.models import Dataset, DatasetKind
from app.policies import repository as policies
from app.projects.auth import AdminCaller, Caller, DatabaseDep, UnboundedDatabaseDep

router = APIRouter(prefix="/v1", tags=["exchange"], responses=DOCUMENTED)

BINARY = {"schema": {"type": "string", "format": "binary"}}
SENDS_PARQUET: dict[int | str, dict[str, Any]] = {200: {"description": "Parquet", "content": {MEDIA_TYPE: BINARY}}}
TAKES_PARQUET = {"requestBody": {"required": True, "content": {MEDIA_TYPE: BINARY}}}
PolicyName = Annotated[str | None, Query(min_length=1, max_length=63)]
Seconds = Annotated[float | None, Query(ge=0, le=1e12, allow_inf_nan=False, description="unix seconds")]
Id = Annotated[str, Path(min_length=1, max_length=64)]
Limit = Annotated[int, Query(ge=1, le=100)]


@router.get("/exports/turns", response_class=Response, responses=SENDS_PARQUET)
async def export_turns(
    request: Request,
    caller: AdminCaller,
    db: UnboundedDatabaseDep,
    policy: PolicyName = None,
    version: Annotated[int | None, Query(ge=0, le=2**31 - 1)] = None,
    since: Seconds = None,
    until: Seconds = None,
    trainable: bool | None = None,
    with_feedback: bool | None = None,
) -> Response:
    """Every turn that is not deleted, oldest first, with what was said about it."""
    wanted = Wanted(
        caller.project_id, await _policy_id(db, caller, policy), version, since, until, trainable, with_feedback
    )
    sheet = ParquetWriter(settings_of(request).home, columns.TURNS)
    return await _download(sheet, "turns.parquet", lambda: turn_rows.write(db, wanted, sheet, request.is_disconnected))


@router.get("/exports/preferences", response_class=Response, responses=SENDS_PARQUET)
async def export_preferences(
    request: Request,
    caller: AdminCaller,
    db: UnboundedDatabaseDep,
    policy: PolicyName = None,
    since: Seconds = None,
    until: Seconds = None,
) -> Response:
    """Pairs of answers to the same messages, from the comparisons, rankings and corrections that count."""
    wanted = Wanted(caller.project_id, await _policy_id(db, caller, policy), since=since, until=until)
    sheet = ParquetWriter(settings_of(request).home, columns.PREFERENCES)
    return await _download(
        sheet, "preferences.parquet", lambda: preference_pairs.write(db, wanted, sheet, request.is_disconnected)
    )


async def _download(sheet: ParquetWriter, name: str, write: Callable[[], Awaitable[None]]) -> Response:
    try:
        await write()
        return ParquetResponse(await sheet.finish(), name)
    except BaseException:
        sheet.close()
        raise


async def _policy_id(db: Database, caller: Caller, name: str | None) -> str | None:
    if name is None:
        return None
    async with db.read() as session:
        policy = await policies.policy_named(session, caller.project_id, name)
    if policy is None:
        raise NotFound(f"There is no policy named '{name}'.", param="policy")
    return policy.id


@router.post(
    "/datasets",
    status_code=201,
    response_model=DatasetView,
    responses={200: {"model": DatasetView, "description": "This file was there before."}},
    openapi_extra=TAKES_PARQUET,
)
async def import_dataset(
    request: Request,
    caller: AdminCaller,
    db: UnboundedDatabaseDep,
    name: Annotated[str, Query(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")],
    kind: DatasetKind,
) -> Response:
    """The body is the file. All of it is checked before anything is stored; the same file again changes nothing."""
    settings = settings_of(request)
    settings.home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=settings.home) as file, tempfile.TemporaryFile(dir=settings.home) as rows:
        sha256 = await upload.receive(request, file, settings.max_import_bytes)
        async with db.read() as session:
            before = await service.known(session, caller.project_id, name, kind, sha256)
        if before is not None:
            return _taken(before, 200)
        async with services_of(request).get(upload.ReaderSlots):
            reading = await upload.read(kind, file, rows, settings.max_import_bytes)
        dataset = service.draft(caller.project_id, name, kind, sha256, reading.num_rows)
        async with db.write() as session:
            before = await service.store(session, dataset, upload.chunks(rows))
        return _taken(before or dataset, 200 if before else 201, reading.left_out)


def _taken(dataset: Dataset, status: int, left_out: list[str] | None = None) -> Response:
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
    async with db.read() as session:
        return DatasetList.of(await service.page(session, caller.project_id, after, limit), limit)


@router.get("/datasets/{id}")
async def get_dataset(id: Id, caller: AdminCaller, db: DatabaseDep) -> DatasetView:
    async with db.read() as session:
        return DatasetView.of(await service.get(session, caller.project_id, id))


@router.get("/datasets/{id}/rows")
async def dataset_rows(
    id: Id,
    caller: AdminCaller,
    db: DatabaseDep,
    limit: Limit = 20,
    after: Annotated[int | None, Query(ge=0, le=2**31 - 1, description="a row's number")] = None,
) -> RowList:
    async with db.read() as session:
        dataset = await service.get(session, caller.project_id, id)
        return RowList.of(await service.rows(session, dataset, after, limit), limit)


@router.delete("/datasets/{id}")
async def delete_dataset(id: Id, caller: AdminCaller, db: UnboundedDatabaseDep) -> DatasetDeleted:
    async with db.write() as session:
        await service.let_go(session, caller.project_id, id)
    return DatasetDeleted(id=id)
