"""Queries on rollouts and rollout plans."""

from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, and_, case, func, or_, select
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import now
from app.core.errors import NotFound
from app.core.pagination import apply_keyset
from app.models import Origin, Policy, Rollout, RolloutPlan, RolloutState


class RolloutCounts(NamedTuple):
    """Rollouts by state, their tokens and seconds, the number of verified ones and the sum of their rewards."""

    open: int = 0
    done: int = 0
    skipped: int = 0
    failed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    verified: int = 0
    reward: float = 0.0


STATES = tuple(RolloutState)
COUNT_COLUMNS: tuple[ColumnElement[Any], ...] = (
    *(func.count(case((Rollout.state == state, 1))) for state in STATES),
    func.coalesce(func.sum(Rollout.tokens), 0),
    func.coalesce(func.sum(Rollout.duration_seconds), 0.0),
    func.count(Rollout.reward),
    func.coalesce(func.sum(Rollout.reward), 0.0),
)


async def count_rollouts(session: AsyncSession, *conditions: ColumnElement[bool]) -> RolloutCounts:
    return RolloutCounts(*(await session.execute(select(*COUNT_COLUMNS).where(*conditions))).one())


async def count_by_plan(session: AsyncSession, plan_ids: list[str]) -> dict[str, RolloutCounts]:
    rows = await session.execute(
        select(Rollout.plan_id, *COUNT_COLUMNS).where(Rollout.plan_id.in_(plan_ids)).group_by(Rollout.plan_id)
    )
    return {str(row[0]): RolloutCounts(*row[1:]) for row in rows}


async def count_recent_tokens(session: AsyncSession, policy_id: str, origin: Origin) -> int:
    """Return the tokens of the policy's rollouts of this origin in the last hour, with the budget of running ones."""
    recent = or_(Rollout.settled_at > now() - 3600, and_(Rollout.settled_at.is_(None), Rollout.tokens > 0))
    query = select(func.coalesce(func.sum(Rollout.tokens), 0)).where(
        Rollout.policy_id == policy_id, Rollout.origin == origin, recent
    )
    return int(await session.scalar(query) or 0)


async def get_plan(session: AsyncSession, policy_id: str, plan_id: str, *, lock: bool = False) -> RolloutPlan:
    """Return the plan, with its row locked if `lock`. Raises NotFound."""
    query = select(RolloutPlan).where(RolloutPlan.id == plan_id, RolloutPlan.policy_id == policy_id)
    plan = await session.scalar(query.with_for_update() if lock else query)
    if plan is None:
        raise NotFound(f"There is no plan '{plan_id}'.", param="plan_id")
    return plan


async def list_plans(session: AsyncSession, policy_id: str, after: str | None, limit: int) -> list[RolloutPlan]:
    """Return up to `limit + 1` plans, the newest first. Raises NotFound."""
    query, last = select(RolloutPlan).where(RolloutPlan.policy_id == policy_id), None
    if after is not None:
        row = await get_plan(session, policy_id, after)
        last = (row.created_at, row.id)
    query = apply_keyset(query, (RolloutPlan.created_at, RolloutPlan.id), last, limit, descending=True)
    return list(await session.scalars(query))


def count_by_state(connection: Connection) -> list[tuple[str, str, str, int, int]]:
    """Return (policy id, origin, state, number of rollouts, tokens) of all policies, for the metrics."""
    rows = connection.execute(
        select(Rollout.policy_id, Rollout.origin, Rollout.state, func.count(), func.sum(Rollout.tokens))
        .join(Policy, Policy.id == Rollout.policy_id)
        .group_by(Rollout.policy_id, Rollout.origin, Rollout.state)
    )
    return [(policy_id, origin, state, count, int(tokens)) for policy_id, origin, state, count, tokens in rows]
