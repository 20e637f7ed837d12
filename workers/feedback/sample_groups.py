"""Groups: a reply and the rollouts to the same prompt. They are trained on together, so each waits for the others."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from sqlalchemy import ColumnElement, and_, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import chunked, now
from app.models import Episode, Origin, Rollout, RolloutState, Turn, TurnState, lock_turns
from workers.feedback.signals import COLUMNS, FinishedTurn, in_order


@dataclass(frozen=True)
class SampleGroups:
    """The groups of completions that have rollouts. The replies of any other completion wait for nothing."""

    members: Mapping[str, Sequence[FinishedTurn]]  # by completion: the finished turns in order of choice
    open_until: Mapping[str, float]  # by completion: when the last open rollout expires

    def with_members(self, turns: Sequence[FinishedTurn]) -> list[FinishedTurn]:
        """Return the turns and all members of their groups, in order of creation."""
        return in_order(chain(*self.members.values(), turns))

    def trainable_group(self, turn: FinishedTurn) -> Sequence[FinishedTurn]:
        """Return the turn and the members of its group that may be trained on."""
        members = self.members.get(turn.completion_id, ())
        return [turn, *(member for member in members if member.exclusion_reason is None)]

    def rated_turn(self, turn: FinishedTurn) -> FinishedTurn:
        """Return the turn whose raters count for this one: for a group sample the chat turn of its group."""
        if turn.origin != Origin.GROUP_SAMPLE:
            return turn
        return next((one for one in self.members[turn.completion_id] if one.origin == Origin.CHAT), turn)


async def lock_groups(session: AsyncSession, turn_ids: Collection[str]) -> None:
    """Lock these turns and the other members of their groups, before anything that depends on them.

    When two replies of a group get their results at the same time, the second must see the first. Otherwise neither
    transaction would find that the group is complete. So must the second of two turns of an episode, or of episodes of
    a group: the first turn of each episode is locked for all of them.
    """
    completion_ids = select(Turn.completion_id).where(Turn.id.in_(turn_ids))
    is_further = or_(Turn.origin != Origin.CHAT, Turn.choice_index > 0)
    with_others = select(Turn.completion_id).where(Turn.completion_id.in_(completion_ids), is_further)
    members = await session.scalars(select(Turn.id).where(Turn.completion_id.in_(with_others)))
    first_turns = await _find_first_turns(session, turn_ids)
    await lock_turns(session, {*turn_ids, *members, *first_turns}, key_share=True)


async def _find_first_turns(session: AsyncSession, turn_ids: Collection[str]) -> list[str]:
    """Return the first turns of the episodes of these turns, and of the other episodes of their groups."""
    of_turns = select(Turn.episode_id).where(Turn.id.in_(turn_ids), Turn.episode_id.is_not(None))
    columns = select(Episode.id, Episode.project_id, Episode.group_id)
    found = (await session.execute(columns.where(Episode.id.in_(of_turns)))).all()
    ids = {row.id for row in found}
    groups: dict[str, set[str]] = defaultdict(set)
    for row in found:
        if row.group_id is not None:
            groups[row.project_id].add(row.group_id)
    for project_id, names in groups.items():  # SQLite uses no index for a condition on pairs of columns
        in_groups = (Episode.project_id == project_id, Episode.group_id.in_(names))
        ids.update(await session.scalars(select(Episode.id).where(*in_groups)))
    first_turns: list[str] = []
    for chunk in chunked(ids):
        is_first = (Turn.episode_id.in_(chunk), Turn.episode_step == 1)
        first_turns += await session.scalars(select(Turn.id).where(*is_first))
    return first_turns


async def lock_and_find_deleted(session: AsyncSession, turn_ids: Collection[str]) -> set[str]:
    """Lock the groups, and return those of the turns that were deleted meanwhile: their results must not be stored."""
    await lock_groups(session, turn_ids)
    return set(await session.scalars(select(Turn.id).where(Turn.id.in_(turn_ids), Turn.deleted_at.is_not(None))))


async def read_groups(
    session: AsyncSession, turns: Sequence[FinishedTurn], *, with_choices_of: Collection[str]
) -> SampleGroups:
    """Return the groups of these turns; of these policies also those of completions with several choices."""
    requested_ids = {turn.completion_id for turn in turns}
    is_further: ColumnElement[bool] = Turn.origin != Origin.CHAT
    if with_choices_of:
        is_further = or_(is_further, and_(Turn.choice_index > 0, Turn.policy_id.in_(with_choices_of)))
    with_rollouts = select(Turn.completion_id).where(Turn.completion_id.in_(requested_ids), is_further)
    completion_ids = set(await session.scalars(with_rollouts.distinct()))
    if not completion_ids:
        return SampleGroups({}, {})
    rows = await session.execute(
        select(*COLUMNS)
        .where(Turn.completion_id.in_(completion_ids), Turn.state != TurnState.OPEN)
        .order_by(Turn.completion_id, Turn.choice_index)
    )
    members: dict[str, list[FinishedTurn]] = defaultdict(list)
    for row in rows:
        turn = FinishedTurn(*row)
        members[turn.completion_id].append(turn)
    open_rollouts = await session.execute(
        select(Turn.completion_id, func.max(Rollout.expires_at))
        .join(Rollout, Rollout.id == Turn.id)
        .where(Turn.completion_id.in_(completion_ids), Rollout.state == RolloutState.OPEN)
        .group_by(Turn.completion_id)
    )
    return SampleGroups(members, {completion_id: expires_at for completion_id, expires_at in open_rollouts})


async def seconds_until_complete(session: AsyncSession, completion_id: str) -> float:
    """Return the seconds until the last open rollout of the completion expires, 0 if none is open."""
    seconds_left = (
        select(func.max(Rollout.expires_at) - now())
        .join(Turn, Turn.id == Rollout.id)
        .where(Turn.completion_id == completion_id, Rollout.state == RolloutState.OPEN)
    )
    return max(await session.scalar(seconds_left) or 0.0, 0.0)
