"""Datasets: taken once, found by name, listed, let go."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

from sqlalchemy import delete, insert, or_, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.errors import Conflict, NotFound
from app.models import Dataset, DatasetRow, new_id


async def known(session: AsyncSession, project_id: str, name: str, kind: str, sha256: str) -> Dataset | None:
    """The dataset that this very file became before. Another file under its name is a conflict."""
    dataset = await session.scalar(select(Dataset).where(Dataset.project_id == project_id, Dataset.name == name))
    if dataset is None or (dataset.sha256, dataset.kind) == (sha256, kind):
        return dataset
    raise Conflict(f"A dataset '{name}' is there already, from another file.", param="name", code="name_taken")


async def store(session: AsyncSession, dataset: Dataset, chunks: AsyncIterator[list[dict[str, Any]]]) -> Dataset | None:
    """Insert it with all its rows. If another request was faster with the name, that one's dataset is returned."""
    try:
        async with session.begin_nested():
            session.add(dataset)
    except IntegrityError:
        return await known(session, dataset.project_id, dataset.name, dataset.kind, dataset.sha256)
    number = 0
    async for chunk in chunks:
        rows = [
            {"dataset_id": dataset.id, "row_number": number + index, "content": content}
            for index, content in enumerate(chunk)
        ]
        await session.execute(insert(DatasetRow), rows)
        number += len(chunk)
    return None


def draft(project_id: str, name: str, kind: str, sha256: str, num_rows: int) -> Dataset:
    return Dataset(id=new_id("ds"), project_id=project_id, name=name, kind=kind, sha256=sha256, num_rows=num_rows)


async def get(session: AsyncSession, project_id: str, id: str) -> Dataset:
    dataset = await session.scalar(select(Dataset).where(Dataset.id == id, Dataset.project_id == project_id))
    if dataset is None:
        raise NotFound(f"There is no dataset '{id}'.", param="id")
    return dataset


async def page(session: AsyncSession, project_id: str, after: str | None, limit: int) -> Sequence[Dataset]:
    """Newest first; one more than `limit` tells that there is more."""
    query = select(Dataset).where(Dataset.project_id == project_id)
    if after is not None:
        last = await get(session, project_id, after)
        older = (Dataset.created_at == last.created_at) & (Dataset.id < last.id)
        query = query.where(or_(Dataset.created_at < last.created_at, older))
    return (await session.scalars(query.order_by(Dataset.created_at.desc(), Dataset.id.desc()).limit(limit + 1))).all()


async def rows(session: AsyncSession, dataset: Dataset, after: int | None, limit: int) -> Sequence[DatasetRow]:
    query = select(DatasetRow).where(DatasetRow.dataset_id == dataset.id)
    if after is not None:
        query = query.where(DatasetRow.row_number > after)
    return (await session.scalars(query.order_by(DatasetRow.row_number).limit(limit + 1))).all()


async def let_go(session: AsyncSession, project_id: str, id: str) -> None:
    """Its rows go with it."""
    dataset = await get(session, project_id, id)
    await session.execute(delete(Dataset).where(Dataset.id == dataset.id))
