"""Siblings: a reply and the rollouts to its prompt. They are learned from together, so each waits for the others."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import now
from app.models import Origin, Rollout, RolloutState, Turn, TurnState, lock_turns
from workers.feedback.signals import COLUMNS, Judged


@dataclass(frozen=True)
class SampleGroups:
    """Of the completions that have rollouts; a completion of chats alone is not here, and its replies do not wait."""

    members: Mapping[str, Sequence[Judged]]  # by completion, those that have ended, in the order of their choices
    until: Mapping[str, float]  # by completion, how long those that have not are expected

    def added_to(self, judged: Sequence[Judged]) -> list[Judged]:
        known = {turn.id: turn for members in self.members.values() for turn in members}
        everything = known | {turn.id: turn for turn in judged}
        return sorted(everything.values(), key=lambda turn: (turn.created_at, turn.id))

    def beside(self, turn: Judged) -> Sequence[Judged]:
        """It and all that it is learned from with."""
        return [turn, *(one for one in self.members.get(turn.completion_id, ()) if one.exclusion_reason is None)]

    def expected(self, turn: Judged) -> float:
        return self.until.get(turn.completion_id, 0.0)

    def speaker(self, turn: Judged) -> Judged:
        """Whose raters count: a shadow takes a place in a batch as part of the reply that somebody was given."""
        if turn.origin != Origin.GROUP_SAMPLE:
            return turn
        return next((one for one in self.members[turn.completion_id] if one.origin == Origin.CHAT), turn)


async def lock(session: AsyncSession, turn_ids: Collection[str]) -> None:
    """These turns and all that they are learned from with, before anything that hangs on them: of two replies that
    are settled at the same time the second must see the first, or neither would know that all have come."""
    mine = select(Turn.completion_id).where(Turn.id.in_(turn_ids))
    rolled = select(Turn.completion_id).where(Turn.completion_id.in_(mine), Turn.origin != Origin.CHAT)
    beside = await session.scalars(select(Turn.id).where(Turn.completion_id.in_(rolled)))
    await lock_turns(session, {*turn_ids, *beside}, key_share=True)


async def of(session: AsyncSession, judged: Sequence[Judged]) -> SampleGroups:
    named = {turn.completion_id for turn in judged}
    rolled = select(Turn.completion_id).where(Turn.completion_id.in_(named), Turn.origin != Origin.CHAT)
    completion_ids = set(await session.scalars(rolled.distinct()))
    if not completion_ids:
        return SampleGroups({}, {})
    rows = await session.execute(
        select(*COLUMNS)
        .where(Turn.completion_id.in_(completion_ids), Turn.state != TurnState.OPEN)
        .order_by(Turn.completion_id, Turn.choice_index)
    )
    members: dict[str, list[Judged]] = defaultdict(list)
    for row in rows:
        turn = Judged(*row)
        members[turn.completion_id].append(turn)
    open_ones = await session.execute(
        select(Turn.completion_id, func.max(Rollout.expires_at))
        .join(Rollout, Rollout.id == Turn.id)
        .where(Turn.completion_id.in_(completion_ids), Rollout.state == RolloutState.OPEN)
        .group_by(Turn.completion_id)
    )
    return SampleGroups(members, {completion_id: until for completion_id, until in open_ones})


async def patience(session: AsyncSession, completion_id: str) -> float:
    """Seconds in which it is worth waiting for rollouts beside this reply; 0 if none is being made."""
    left = (
        select(func.max(Rollout.expires_at) - now())
        .join(Turn, Turn.id == Rollout.id)
        .where(Turn.completion_id == completion_id, Rollout.state == RolloutState.OPEN)
    )
    return max(await session.scalar(left) or 0.0, 0.0)
