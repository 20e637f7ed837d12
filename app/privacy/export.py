"""The export of a data subject: every row as one line of JSON, read page by page."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import orjson
from sqlalchemy import Select, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import Database
from app.models import Base, Feedback, FeedbackRank, Judgement, Reward, Sample, Turn
from app.privacy import repository
from app.privacy.identities import SubjectNames

PAGE_SIZE = 64  # turns in memory at a time
# Columns of the service that say nothing about the subject.
INTERNAL_COLUMNS = {
    "lease_owner",
    "lease_until",
    "heartbeat_at",
    "attempt",
    "fence",
    "processed",
    "request_sha256",
    "fingerprint",
}


async def export_lines(db: Database, names: SubjectNames) -> AsyncIterator[bytes]:
    """Yield raters and pins, then the turns with the rows that belong to them, then feedback on others' turns."""
    async with db.read() as session:
        records = await repository.find_records(session, names)
        yield _to_lines("rater", await repository.list_raters(session, names))
        yield _to_lines("pin", await _read_rows(session, repository.select_pins(names)))
    for start in range(0, len(records.turns), PAGE_SIZE):
        ids = records.turns[start : start + PAGE_SIZE]
        async with db.read() as session:
            for kind, query in _turn_queries(ids).items():
                yield _to_lines(kind, await _read_rows(session, query))
    for start in range(0, len(records.feedback), PAGE_SIZE):
        seqs = records.feedback[start : start + PAGE_SIZE]
        async with db.read() as session:
            yield _to_lines("feedback", await _read_rows(session, select(Feedback).where(Feedback.seq.in_(seqs))))


def _turn_queries(ids: Sequence[str]) -> dict[str, Select[Any]]:
    ranked = select(FeedbackRank.feedback_seq).where(FeedbackRank.turn_id.in_(ids))
    return {
        "turn": select(Turn).where(Turn.id.in_(ids)).order_by(Turn.created_at),
        "feedback.received": select(Feedback).where(or_(Feedback.turn_id.in_(ids), Feedback.seq.in_(ranked))),
        "reward": select(Reward).where(Reward.turn_id.in_(ids)),
        "judgement": select(Judgement).where(Judgement.turn_id.in_(ids)),
        "sample": select(Sample).where(Sample.turn_id.in_(ids)),
    }


async def _read_rows(session: AsyncSession, query: Select[Any]) -> Sequence[Base]:
    return (await session.scalars(query)).all()


def _to_lines(kind: str, rows: Sequence[Base]) -> bytes:
    """Example: {"object": "turn", "id": "chatcmpl-…", "messages": […], …}"""
    return b"".join(
        orjson.dumps({"object": kind, **{name: getattr(row, name) for name in _columns(row)}}) + b"\n" for row in rows
    )


def _columns(row: Base) -> list[str]:
    return [column.key for column in type(row).__table__.columns if column.key not in INTERNAL_COLUMNS]
