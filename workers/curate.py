"""Feedback → Rewards and Samples."""

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from alignment import rewards
from app.db import Database
from app.jobs import nudge
from app.models import Feedback, Reward, Sample, SampleState, Turn, TurnState, new_id

PAGE = 500


async def curate(db: Database) -> int:
    """Turn all feedback that has not been looked at into rewards and samples. Returns how many were read."""
    total = 0
    while read := await _page(db):
        total += read
    return total


async def _page(db: Database) -> int:
    async with db.write() as session:
        fresh = list(
            await session.scalars(
                select(Feedback)
                .join(Turn, Turn.id == Feedback.turn_id)
                .where(Feedback.curated.is_(False), Turn.state != TurnState.OPEN)  # a thumb may outrun its stream
                .order_by(Feedback.seq)
                .limit(PAGE)
                .with_for_update(of=Feedback)
            )
        )
        turns = await session.scalars(select(Turn).where(Turn.id.in_({row.turn_id for row in fresh})))
        for turn in list(turns):
            await _reward(session, turn)
        await session.execute(
            update(Feedback)
            .where(Feedback.seq.in_([row.seq for row in fresh]))
            .values(curated=True)
            .execution_options(synchronize_session=False)
        )
        if fresh:
            nudge(session, "assemble")
    return len(fresh)


async def _reward(session: AsyncSession, turn: Turn) -> None:
    """Rewards kept apart by source, and the one sample that carries their mean."""
    said = list(await session.scalars(select(Feedback).where(Feedback.turn_id == turn.id).order_by(Feedback.seq)))
    known = {row.source: row for row in await session.scalars(select(Reward).where(Reward.turn_id == turn.id))}
    worth = rewards.by_source(
        [rewards.Said(_source(row), row.kind, row.value) for row in said if row.value is not None]
    )
    for source, value in worth.items():
        if source in known:
            known[source].value = value
        else:
            session.add(Reward(id=new_id("rew"), turn_id=turn.id, source=source, value=value))
    if worth:
        await _sample(session, turn, rewards.combine(worth))


def _source(row: Feedback) -> str:
    """Example: "default/HUMAN/user-7"."""
    return f"{row.name}/{row.source_kind}/{row.source_id or ''}"


async def _sample(session: AsyncSession, turn: Turn, reward: float) -> None:
    sample = await session.get(Sample, turn.id)
    if sample is None:
        session.add(
            Sample(
                turn_id=turn.id,
                policy_id=turn.policy_id,
                version_id=turn.version_id,
                reward=reward,
                state=SampleState.DROPPED if turn.flaw else SampleState.OPEN,
                reason=turn.flaw,
            )
        )
    elif sample.state == SampleState.OPEN:  # late or second thoughts count until a batch is frozen
        sample.reward = reward
