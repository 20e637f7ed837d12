"""The export of turns: which turns are read, page by page, and the rows of the Parquet file."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import orjson
import pyarrow as pa  # type: ignore[import-untyped]
from sqlalchemy import ColumnElement, Row, and_, exists, or_, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from app.chat.histories import read_messages, read_prompt_ids
from app.core.database import Database
from app.feedback.effective import is_effective
from app.models import Feedback, FeedbackRank, Origin, Policy, Turn, TurnState, Version
from app.policies.references import format_reference

PAGE_SIZE = 64  # turns in memory at a time; one may have a prompt of megabytes


def _text_columns(*names: str) -> list[tuple[str, pa.DataType]]:
    return [(name, pa.string()) for name in names]


FEEDBACK_TYPE = pa.struct(
    [
        *_text_columns("id", "kind", "name"),
        ("value", pa.float64()),
        *_text_columns("raw_value", "comment", "source_kind", "source_id"),
        ("created_at", pa.float64()),
        ("effective", pa.bool_()),
    ]
)

TURNS_SCHEMA = pa.schema(
    [
        *_text_columns("id", "completion_id"),
        ("choice_index", pa.int32()),
        *_text_columns("conversation_id", "parent_id", "episode_id"),
        ("episode_step", pa.int32()),
        *_text_columns("agent", "state_key"),
        ("created_at", pa.float64()),
        *_text_columns("model", "policy"),
        ("version", pa.int32()),
        *_text_columns("route_reason", "messages", "request_params", "reply"),
        ("prompt_ids", pa.list_(pa.int32())),
        ("output_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        *_text_columns("sampling"),
        ("temperature", pa.float64()),
        *_text_columns("finish_reason"),
        ("length_penalty", pa.float64()),
        *_text_columns("exclusion_reason", "prefix_reuse", "state", "end_user"),
        ("metadata", pa.map_(pa.string(), pa.string())),
        ("feedback", pa.list_(FEEDBACK_TYPE)),
    ]
)


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

    def conditions(self, table: type[Turn] | type[Feedback]) -> list[ColumnElement[bool]]:
        """Return the conditions on the project and the time, for turns or for feedback."""
        conditions = [table.project_id == self.project_id]
        if self.since is not None:
            conditions.append(table.created_at >= self.since)
        if self.until is not None:
            conditions.append(table.created_at < self.until)
        return conditions


async def read_pages(db: Database, export_filter: ExportFilter) -> AsyncGenerator[list[dict[str, object]]]:
    """Yield rows for every turn that matches the filter, oldest first. Each page is read in one short transaction."""
    last: tuple[float, str] | None = None
    while True:
        async with db.read() as session:
            rows = await read_turns(session, export_filter, last)
            ids = [turn.id for turn, _, _ in rows]
            feedback = await read_feedback(session, export_filter.project_id, ids)
            messages, prompt_ids = await read_messages(session, ids), await read_prompt_ids(session, ids)
        prompts = {id: {"messages": _to_json(messages.get(id)), "prompt_ids": prompt_ids.get(id)} for id in ids}
        yield [_turn_row(turn, policy, number, feedback[turn.id]) | prompts[turn.id] for turn, policy, number in rows]
        if len(rows) < PAGE_SIZE:
            return
        last = (rows[-1][0].created_at, rows[-1][0].id)


async def read_turns(
    session: AsyncSession, export_filter: ExportFilter, last: tuple[float, str] | None
) -> Sequence[Row[Turn, str, int]]:
    """Return the next turns with the policy's name and the version's number, oldest first."""
    query = (
        select(Turn, Policy.name, Version.number)
        .join(Policy, Policy.id == Turn.policy_id)
        .join(Version, Version.id == Turn.version_id)
        .where(*export_filter.conditions(Turn), Turn.deleted_at.is_(None), Turn.origin == Origin.CHAT)
        .order_by(Turn.created_at, Turn.id)
        .limit(PAGE_SIZE)
    )
    if export_filter.policy_id is not None:
        query = query.where(Turn.policy_id == export_filter.policy_id)
    if export_filter.version is not None:
        query = query.where(Version.number == export_filter.version)
    if export_filter.trainable is not None:
        trainable = and_(Turn.exclusion_reason.is_(None), Turn.state != TurnState.OPEN, Turn.output_ids.is_not(None))
        query = query.where(trainable if export_filter.trainable else ~trainable)
    if export_filter.with_feedback is not None:
        query = query.where(_has_feedback() if export_filter.with_feedback else ~_has_feedback())
    if last is not None:
        query = query.where(tuple_(Turn.created_at, Turn.id) > last)
    return (await session.execute(query)).all()


def _has_feedback() -> ColumnElement[bool]:
    """Return the condition for turns with effective feedback."""
    ranked = select(FeedbackRank.turn_id).join(Feedback, Feedback.seq == FeedbackRank.feedback_seq)
    return or_(
        exists().where(Feedback.turn_id == Turn.id, is_effective()),
        ranked.where(FeedbackRank.turn_id == Turn.id, is_effective()).exists(),
    )


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


def _turn_row(turn: Turn, policy: str, number: int, feedback: Sequence[tuple[Feedback, bool]]) -> dict[str, object]:
    metadata = turn.request_metadata.items()
    return {
        **_copy_fields(turn, TURNS_SCHEMA.names),
        "model": format_reference(policy, number),
        "policy": policy,
        "version": number,
        **{name: _to_json(getattr(turn, name)) for name in ("request_params", "reply", "sampling")},
        "temperature": turn.sampling.get("temperature"),
        "metadata": {key: value if isinstance(value, str) else _to_json(value) for key, value in metadata},
        "feedback": [
            {**_copy_fields(row, FEEDBACK_TYPE.names), "raw_value": _to_json(row.raw_value), "effective": effective}
            for row, effective in feedback
        ],
    }


def _copy_fields(row: Turn | Feedback, names: Sequence[str]) -> dict[str, object]:
    """Return the row's attributes with these names, where it has them."""
    return {name: getattr(row, name) for name in names if hasattr(row, name)}


def _to_json(value: object) -> str | None:
    return None if value is None else orjson.dumps(value).decode()
