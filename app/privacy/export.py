"""Everything on record of one subject, a line of JSON each, page by page."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import orjson
from sqlalchemy import Select, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import Database
from app.models import Base, Feedback, FeedbackRank, Judgement, Reward, Sample, Turn
from app.privacy import repository
from app.privacy.identities import Names

PAGE = 64  # turns in memory at a time
# What is the service's own, and no word of theirs.
INTERNAL = {
    "lease_owner",
    "lease_until",
    "heartbeat_at",
    "attempt",
    "fence",
    "processed",
    "request_sha256",
    "fingerprint",
}


async def lines(db: Database, names: Names) -> AsyncIterator[bytes]:
    """Raters and pins, then turn by turn what belongs to it, then what they said of others."""
    async with db.read() as session:
        found = await repository.found(session, names)
        yield _written("rater", await repository.raters(session, names))
        yield _written("pin", await _rows(session, repository.pins_of(names)))
    for start in range(0, len(found.turns), PAGE):
        ids = found.turns[start : start + PAGE]
        async with db.read() as session:
            for kind, asked in _of_turns(ids).items():
                yield _written(kind, await _rows(session, asked))
    for start in range(0, len(found.words), PAGE):
        seqs = found.words[start : start + PAGE]
        async with db.read() as session:
            yield _written("feedback", await _rows(session, select(Feedback).where(Feedback.seq.in_(seqs))))


def _of_turns(ids: Sequence[str]) -> dict[str, Select[Any]]:
    ranked = select(FeedbackRank.feedback_seq).where(FeedbackRank.turn_id.in_(ids))
    return {
        "turn": select(Turn).where(Turn.id.in_(ids)).order_by(Turn.created_at),
        "feedback.received": select(Feedback).where(or_(Feedback.turn_id.in_(ids), Feedback.seq.in_(ranked))),
        "reward": select(Reward).where(Reward.turn_id.in_(ids)),
        "judgement": select(Judgement).where(Judgement.turn_id.in_(ids)),
        "sample": select(Sample).where(Sample.turn_id.in_(ids)),
    }


async def _rows(session: AsyncSession, asked: Select[Any]) -> Sequence[Base]:
    return (await session.scalars(asked)).all()


def _written(kind: str, rows: Sequence[Base]) -> bytes:
    """Example: {"object": "turn", "id": "chatcmpl-…", "messages": […], …}"""
    return b"".join(
        orjson.dumps({"object": kind, **{name: getattr(row, name) for name in _columns(row)}}) + b"\n" for row in rows
    )


def _columns(row: Base) -> list[str]:
    return [column.key for column in type(row).__table__.columns if column.key not in INTERNAL]
