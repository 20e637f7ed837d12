"""Feedback → Rewards and Samples."""

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from alignment import rewards
from app.db import Database
from app.jobs import nudge
from app.models import Feedback, Reward, Sample, SampleState, Turn, TurnState, new_id

PAGE = 500
WITHDRAWN = "withdrawn"  # why a sample was dropped: everything that was said of its turn has been taken back


class Judged(NamedTuple):
    """What becomes of a turn's sample needs no more of the turn than this."""

    id: str
    policy_id: str
    version_id: str
    flaw: str | None


async def curate(db: Database) -> int:
    """Turn all feedback that has not been looked at into rewards and samples. Returns how many were read."""
    total = 0
    while read := await _page(db):
        total += read
    return total


async def _page(db: Database) -> int:
    async with db.write() as session:
        fresh = list(
            await session.execute(
                select(Feedback.seq, Feedback.turn_id)
                .outerjoin(Turn, Turn.id == Feedback.turn_id)
                .where(
                    Feedback.curated.is_(False),
                    or_(Turn.id.is_(None), Turn.state != TurnState.OPEN),  # a thumb may outrun its stream
                )
                .order_by(Feedback.seq)
                .limit(PAGE)
                .with_for_update(of=Feedback)
            )
        )
        await _judge(session, {turn_id for _, turn_id in fresh if turn_id is not None})
        await session.execute(
            update(Feedback)
            .where(Feedback.seq.in_([seq for seq, _ in fresh]))
            .values(curated=True)
            .execution_options(synchronize_session=False)
        )
        if fresh:
            nudge(session, "assemble")
    return len(fresh)


async def _judge(session: AsyncSession, turn_ids: set[str]) -> None:
    turns = await session.execute(
        select(Turn.id, Turn.policy_id, Turn.version_id, Turn.flaw).where(Turn.id.in_(turn_ids)).order_by(Turn.id)
    )
    for turn in [Judged(*row) for row in turns]:
        await _reward(session, turn)


async def _reward(session: AsyncSession, turn: Judged) -> None:
    """Rewards kept apart by source, and the one sample that carries their mean."""
    said = list(await session.scalars(select(Feedback).where(Feedback.turn_id == turn.id).order_by(Feedback.seq)))
    known = {row.source: row for row in await session.scalars(select(Reward).where(Reward.turn_id == turn.id))}
    heard = _heard(said)
    worth = rewards.by_source(heard)
    for source, value in worth.items():
        if source in known:
            known[source].value = value
        else:
            session.add(Reward(id=new_id("rew"), turn_id=turn.id, source=source, value=value))
    for source in {one.source for one in heard} & known.keys() - worth.keys():
        await session.delete(known[source])
    await _sample(session, turn, rewards.combine(worth) if worth else None)


def _heard(said: Sequence[Feedback]) -> list[rewards.Said]:
    """Numbers, and the withdrawals of numbers: who takes a comment back has not taken the thumb back."""
    numbers = {row.id for row in said if row.kind in rewards.KINDS and row.value is not None}
    return [
        rewards.Said(_source(row), row.kind, row.value)
        for row in said
        if row.id in numbers or (row.kind == rewards.WITHDRAWAL and row.details.get("withdraws") in numbers)
    ]


def _source(row: Feedback) -> str:
    """Example: "default/HUMAN/user-7"."""
    return f"{row.name}/{row.source_kind}/{row.source_id or ''}"


async def _sample(session: AsyncSession, turn: Judged, reward: float | None) -> None:
    """Late or second thoughts count until a batch is frozen."""
    sample = await session.get(Sample, turn.id, with_for_update=True)
    if sample is None:
        if reward is not None:
            session.add(_new(turn, reward))
    elif reward is None:
        if sample.state == SampleState.OPEN:
            sample.state, sample.reason = SampleState.DROPPED, WITHDRAWN
    elif sample.state == SampleState.OPEN:
        sample.reward = reward
    elif (sample.state, sample.reason) == (SampleState.DROPPED, WITHDRAWN):
        sample.state, sample.reason, sample.reward = SampleState.OPEN, None, reward


def _new(turn: Judged, reward: float) -> Sample:
    return Sample(
        turn_id=turn.id,
        policy_id=turn.policy_id,
        version_id=turn.version_id,
        reward=reward,
        state=SampleState.DROPPED if turn.flaw else SampleState.OPEN,
        reason=turn.flaw,
    )
