"""Queries on rollouts: what they came to, what they cost, which plans there are."""

from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, and_, case, func, or_, select
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import now
from app.core.errors import NotFound
from app.models import Origin, Policy, Rollout, RolloutPlan, RolloutState


class Tally(NamedTuple):
    open: int = 0
    done: int = 0
    skipped: int = 0
    failed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    verified: int = 0
    reward: float = 0.0


STATES = tuple(RolloutState)
COUNTED: tuple[ColumnElement[Any], ...] = (
    *(func.count(case((Rollout.state == state, 1))) for state in STATES),
    func.coalesce(func.sum(Rollout.tokens), 0),
    func.coalesce(func.sum(Rollout.duration_seconds), 0.0),
    func.count(Rollout.reward),
    func.coalesce(func.sum(Rollout.reward), 0.0),
)


async def tally(session: AsyncSession, *which: ColumnElement[bool]) -> Tally:
    return Tally(*(await session.execute(select(*COUNTED).where(*which))).one())


async def of_plans(session: AsyncSession, plan_ids: list[str]) -> dict[str, Tally]:
    rows = await session.execute(
        select(Rollout.plan_id, *COUNTED).where(Rollout.plan_id.in_(plan_ids)).group_by(Rollout.plan_id)
    )
    return {str(row[0]): Tally(*row[1:]) for row in rows}


async def spent(session: AsyncSession, policy_id: str, origin: Origin) -> int:
    """Tokens of the policy's rollouts of this origin in the last hour, with those that the ones under way may take."""
    recent = or_(Rollout.settled_at > now() - 3600, and_(Rollout.settled_at.is_(None), Rollout.tokens > 0))
    asked = select(func.coalesce(func.sum(Rollout.tokens), 0)).where(
        Rollout.policy_id == policy_id, Rollout.origin == origin, recent
    )
    return int(await session.scalar(asked) or 0)


async def plan(session: AsyncSession, policy_id: str, plan_id: str, *, lock: bool = False) -> RolloutPlan:
    """Raises NotFound."""
    asked = select(RolloutPlan).where(RolloutPlan.id == plan_id, RolloutPlan.policy_id == policy_id)
    found = await session.scalar(asked.with_for_update() if lock else asked)
    if found is None:
        raise NotFound(f"There is no plan '{plan_id}'.", param="plan_id")
    return found


async def plans(session: AsyncSession, policy_id: str, after: str | None, limit: int) -> list[RolloutPlan]:
    """The newest first; one more than `limit` tells that there is more. Raises NotFound."""
    asked = select(RolloutPlan).where(RolloutPlan.policy_id == policy_id)
    if after is not None:
        last = await plan(session, policy_id, after)
        older = (RolloutPlan.created_at == last.created_at) & (RolloutPlan.id < last.id)
        asked = asked.where((RolloutPlan.created_at < last.created_at) | older)
    rows = await session.scalars(asked.order_by(RolloutPlan.created_at.desc(), RolloutPlan.id.desc()).limit(limit + 1))
    return list(rows)


def counts(connection: Connection) -> list[tuple[str, str, str, int, int]]:
    """For the page of metrics, of all policies: policy, origin, state, how many, and their tokens."""
    rows = connection.execute(
        select(Rollout.policy_id, Rollout.origin, Rollout.state, func.count(), func.sum(Rollout.tokens))
        .join(Policy, Policy.id == Rollout.policy_id)
        .group_by(Rollout.policy_id, Rollout.origin, Rollout.state)
    )
    return [(policy_id, origin, state, count, int(tokens)) for policy_id, origin, state, count, tokens in rows]
