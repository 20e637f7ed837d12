"""Queries on feedback."""

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.models import Feedback, Turn


async def turn_of(session: AsyncSession, project_id: str, completion_id: str) -> Turn | None:
    return await session.scalar(select(Turn).where(Turn.id == completion_id, Turn.project_id == project_id))


async def with_key(session: AsyncSession, project_id: str, idempotency_key: str) -> Feedback | None:
    return await session.scalar(
        select(Feedback).where(Feedback.project_id == project_id, Feedback.idempotency_key == idempotency_key)
    )


async def of_turn(session: AsyncSession, turn_id: str) -> list[Feedback]:
    return list(await session.scalars(select(Feedback).where(Feedback.turn_id == turn_id).order_by(Feedback.seq)))
