"""Queries on datasets, and on the turns and feedback that are exported, page by page."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Row, and_, delete, exists, insert, or_, select, tuple_
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import load_only

from app.core.errors import Conflict, NotFound
from app.core.pagination import apply_keyset
from app.feedback.effective import is_effective
from app.models import (
    RANKING_KINDS,
    Dataset,
    DatasetRow,
    Feedback,
    FeedbackRank,
    Origin,
    Policy,
    Turn,
    TurnState,
    Version,
    new_id,
)

CORRECTION = "correction"


@dataclass(frozen=True)
class ExportFilter:
    """Which rows are exported. A field that is None restricts nothing."""

    project_id: str
    policy_id: str | None = None
    version: int | None = None
    since: float | None = None
    until: float | None = None
    trainable: bool | None = None
    with_feedback: bool | None = None


def is_trainable() -> ColumnElement[bool]:
    """Return the condition for turns that may be trained on."""
    return and_(Turn.exclusion_reason.is_(None), Turn.state != TurnState.OPEN, Turn.output_ids.is_not(None))


def has_feedback() -> ColumnElement[bool]:
    """Return the condition for turns with effective feedback."""
    ranked = select(FeedbackRank.turn_id).join(Feedback, Feedback.seq == FeedbackRank.feedback_seq)
    return or_(
        exists().where(Feedback.turn_id == Turn.id, is_effective()),
        ranked.where(FeedbackRank.turn_id == Turn.id, is_effective()).exists(),
    )


async def read_turns(
    session: AsyncSession, export_filter: ExportFilter, last: tuple[float, str] | None, limit: int
) -> Sequence[Row[Turn, str, int]]:
    """Return the next turns with the policy's name and the version's number, oldest first."""
    query = (
        select(Turn, Policy.name, Version.number)
        .join(Policy, Policy.id == Turn.policy_id)
        .join(Version, Version.id == Turn.version_id)
        .where(*_conditions(export_filter))
        .order_by(Turn.created_at, Turn.id)
        .limit(limit)
    )
    if last is not None:
        query = query.where(tuple_(Turn.created_at, Turn.id) > last)
    return (await session.execute(query)).all()


def _conditions(export_filter: ExportFilter) -> list[ColumnElement[bool]]:
    conditions = [Turn.project_id == export_filter.project_id, Turn.deleted_at.is_(None), Turn.origin == Origin.CHAT]
    if export_filter.policy_id is not None:
        conditions.append(Turn.policy_id == export_filter.policy_id)
    if export_filter.version is not None:
        conditions.append(Version.number == export_filter.version)
    if export_filter.since is not None:
        conditions.append(Turn.created_at >= export_filter.since)
    if export_filter.until is not None:
        conditions.append(Turn.created_at < export_filter.until)
    if export_filter.trainable is not None:
        conditions.append(is_trainable() if export_filter.trainable else ~is_trainable())
    if export_filter.with_feedback is not None:
        conditions.append(has_feedback() if export_filter.with_feedback else ~has_feedback())
    return conditions


async def read_feedback(
    session: AsyncSession, project_id: str, turn_ids: Sequence[str]
) -> dict[str, list[tuple[Feedback, bool]]]:
    """Return the feedback by turn id, in order of arrival, each with whether it is effective.

    A ranking is listed with each of its turns.
    """
    effective = is_effective().label("effective")
    direct = select(Feedback.turn_id, Feedback, effective).where(Feedback.turn_id.in_(turn_ids))
    ranked = (
        select(FeedbackRank.turn_id, Feedback, effective)
        .join(Feedback, Feedback.seq == FeedbackRank.feedback_seq)
        .where(FeedbackRank.turn_id.in_(turn_ids))
    )
    by_turn: dict[str, dict[int, tuple[Feedback, bool]]] = {id: {} for id in turn_ids}
    for query in (direct, ranked):
        for turn_id, feedback, is_latest in await session.execute(query.where(Feedback.project_id == project_id)):
            by_turn[str(turn_id)][feedback.seq] = (feedback, bool(is_latest))
    return {id: [rows[seq] for seq in sorted(rows)] for id, rows in by_turn.items()}


async def read_preferences(
    session: AsyncSession, export_filter: ExportFilter, last_seq: int, limit: int
) -> Sequence[Feedback]:
    """Return the next effective comparisons, rankings and corrections, in order of arrival."""
    query = select(Feedback).where(
        Feedback.project_id == export_filter.project_id,
        Feedback.kind.in_((*RANKING_KINDS, CORRECTION)),
        Feedback.seq > last_seq,
        is_effective(),
    )
    if export_filter.since is not None:
        query = query.where(Feedback.created_at >= export_filter.since)
    if export_filter.until is not None:
        query = query.where(Feedback.created_at < export_filter.until)
    return (await session.scalars(query.order_by(Feedback.seq).limit(limit))).all()


async def read_ranks(session: AsyncSession, seqs: Sequence[int]) -> dict[int, list[FeedbackRank]]:
    """Return the ranks by the feedback's sequence number, best first."""
    ranks: dict[int, list[FeedbackRank]] = {seq: [] for seq in seqs}
    for row in await session.scalars(
        select(FeedbackRank).where(FeedbackRank.feedback_seq.in_(seqs)).order_by(FeedbackRank.rank)
    ):
        ranks[row.feedback_seq].append(row)
    return ranks


async def read_replies(session: AsyncSession, export_filter: ExportFilter, turn_ids: set[str]) -> dict[str, Turn]:
    """Return the turns that have a reply and are not deleted, by id."""
    query = (
        select(Turn)
        .where(Turn.id.in_(turn_ids), Turn.project_id == export_filter.project_id, Turn.deleted_at.is_(None))
        .options(load_only(Turn.id, Turn.policy_id, Turn.messages, Turn.reply))
    )
    if export_filter.policy_id is not None:
        query = query.where(Turn.policy_id == export_filter.policy_id)
    return {turn.id: turn for turn in await session.scalars(query) if turn.reply}


async def find_same_file(session: AsyncSession, project_id: str, name: str, kind: str, sha256: str) -> Dataset | None:
    """Return the dataset that was imported from this file before. Raises Conflict for another file of that name."""
    dataset = await session.scalar(select(Dataset).where(Dataset.project_id == project_id, Dataset.name == name))
    if dataset is None or (dataset.sha256, dataset.kind) == (sha256, kind):
        return dataset
    raise Conflict(f"The dataset '{name}' exists already, from another file.", param="name", code="name_taken")


async def store_dataset(
    session: AsyncSession, dataset: Dataset, chunks: AsyncIterator[list[dict[str, Any]]]
) -> Dataset | None:
    """Insert the dataset with its rows, and return None.

    If another request has taken the name meanwhile, that request's dataset is returned. Raises Conflict.
    """
    try:
        async with session.begin_nested():
            session.add(dataset)
    except IntegrityError:
        return await find_same_file(session, dataset.project_id, dataset.name, dataset.kind, dataset.sha256)
    number = 0
    async for chunk in chunks:
        rows = [
            {"dataset_id": dataset.id, "row_number": number + index, "content": content}
            for index, content in enumerate(chunk)
        ]
        await session.execute(insert(DatasetRow), rows)
        number += len(chunk)
    return None


def new_dataset(project_id: str, name: str, kind: str, sha256: str, num_rows: int) -> Dataset:
    return Dataset(id=new_id("ds"), project_id=project_id, name=name, kind=kind, sha256=sha256, num_rows=num_rows)


async def get_dataset(session: AsyncSession, project_id: str, id: str) -> Dataset:
    """Return the dataset. Raises NotFound."""
    dataset = await session.scalar(select(Dataset).where(Dataset.id == id, Dataset.project_id == project_id))
    if dataset is None:
        raise NotFound(f"There is no dataset '{id}'.", param="id")
    return dataset


async def list_datasets(session: AsyncSession, project_id: str, after: str | None, limit: int) -> Sequence[Dataset]:
    """Return up to `limit + 1` datasets, the newest first."""
    query, last = select(Dataset).where(Dataset.project_id == project_id), None
    if after is not None:
        dataset = await get_dataset(session, project_id, after)
        last = (dataset.created_at, dataset.id)
    query = apply_keyset(query, (Dataset.created_at, Dataset.id), last, limit, descending=True)
    return (await session.scalars(query)).all()


async def list_rows(session: AsyncSession, dataset: Dataset, after: int | None, limit: int) -> Sequence[DatasetRow]:
    """Return up to `limit + 1` rows after the row number `after`."""
    query = select(DatasetRow).where(DatasetRow.dataset_id == dataset.id)
    query = apply_keyset(query, (DatasetRow.row_number,), None if after is None else (after,), limit)
    return (await session.scalars(query)).all()


async def delete_dataset(session: AsyncSession, project_id: str, id: str) -> None:
    """Delete the dataset with its rows. Raises NotFound."""
    dataset = await get_dataset(session, project_id, id)
    await session.execute(delete(Dataset).where(Dataset.id == dataset.id))
