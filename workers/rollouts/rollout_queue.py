"""Rollouts that wait: created as rows, and claimed while engines have capacity beside chats and budget is left."""

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sqlalchemy import and_, exists, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import Database, now
from app.core.jobs import enqueue_after_commit
from app.core.leases import LeaseLost, lease_is_free
from app.core.settings import Settings
from app.deployments import shadow
from app.models import Engine, Origin, PlanState, Policy, Rollout, RolloutPlan, RolloutState, Turn, TurnState, Version
from app.policies import service
from app.training.rollouts import repository
from app.training.rollouts.config import effective_rollouts
from workers.queue.leased_job import Lease, claim_row
from workers.rollouts import record_rollout

MAX_ROWS_PER_POLICY = 32  # read at once: a long queue of one policy must not hide the others
CHAT_SECONDS = 120.0  # after that an open chat is considered lost
# Why a rollout is skipped.
EXPIRED = "no engine had capacity for it in time"
VERSION_GONE = "no engine has its version loaded any more"
OUT_OF_BUDGET = "the hourly budget is spent"
PLAN_ENDED = "its plan has ended"
IS_RUNNING = and_(Rollout.state == RolloutState.OPEN, Rollout.lease_until > now())
IS_DUE = and_(Rollout.state == RolloutState.OPEN, Rollout.due_at <= now(), lease_is_free(Rollout))


@dataclass(frozen=True)
class RolloutLease(Lease):
    """A claimed rollout, and the engine that samples it."""

    engine: str
    url: str


@dataclass(frozen=True)
class EngineCapacity:
    """The load of the ready engines: open chats by engine, running rollouts by engine and policy."""

    engines: Sequence[Engine]
    num_chats: Counter[str]
    num_rollouts: Counter[tuple[str, str]]

    @classmethod
    async def read(cls, session: AsyncSession) -> "EngineCapacity":
        chats = await session.execute(
            select(Turn.engine, func.count())
            .where(Turn.state == TurnState.OPEN, Turn.origin == Origin.CHAT, Turn.created_at > now() - CHAT_SECONDS)
            .group_by(Turn.engine)
        )
        rollouts = await session.execute(
            select(Rollout.engine, Rollout.policy_id, func.count())
            .where(IS_RUNNING)
            .group_by(Rollout.engine, Rollout.policy_id)
        )
        return cls(
            await service.list_ready_engines(session),
            Counter({name: count for name, count in chats}),
            Counter({(str(name), policy_id): count for name, policy_id, count in rollouts}),
        )

    def choose_engine(
        self, policy: Policy, version: Version, settings: Settings, preferred: str | None = None
    ) -> Engine | None:
        """Return an engine with capacity for one more rollout, None if there is none.

        The engine named `preferred` is chosen if it has capacity: it has the prompt in its prefix cache.
        """
        config = effective_rollouts(policy, settings)
        candidates = [
            engine
            for engine in self.engines_with(version)
            if self.num_chats[engine.name] <= config.max_open_chats
            and self.num_rollouts[engine.name, policy.id] < config.in_flight
        ]
        return min(
            candidates,
            key=lambda engine: (engine.name != preferred, self.num_rollouts[engine.name, policy.id]),
            default=None,
        )

    def engines_with(self, version: Version) -> list[Engine]:
        """Return the engines that have the version loaded."""
        return [engine for engine in self.engines if service.is_loaded(engine, version)]


async def create_rollouts(
    session: AsyncSession, turns: list[dict[str, Any]], *, expires_in: float, **plan_values: Any
) -> None:
    """Insert planned turns and their rollouts, and enqueue the rollout task.

    `turns` holds column values, `expires_in` is in seconds, `plan_values` are the rollouts' columns of a plan.
    """
    defaults = {"state": TurnState.OPEN, "stream": False}
    await session.execute(insert(Turn), [defaults | turn for turn in turns])
    rows = [
        {
            "id": turn["id"],
            "policy_id": turn["policy_id"],
            "origin": turn["origin"],
            "choice_index": turn["choice_index"],
            "state": RolloutState.OPEN,
            **plan_values,
        }
        for turn in turns
    ]
    await session.execute(insert(Rollout).values(due_at=now(), expires_at=now() + expires_in), rows)
    enqueue_after_commit(session, "rollout")


async def claim_rollouts(db: Database, settings: Settings, owner: str) -> list[RolloutLease]:
    """Claim due rollouts while the engines have capacity. Skip those that must not be sampled any more."""
    async with db.read() as session:  # a read blocks nobody; on SQLite a write blocks other writers
        if not await session.scalar(select(exists().where(IS_DUE))):
            return []
    claimed: list[RolloutLease] = []
    skipped: list[tuple[str, int, str]] = []
    budgets: dict[tuple[str, str], float] = {}  # tokens left by (policy id, origin)
    async with db.write() as session:
        capacity = await EngineCapacity.read(session)
        if not capacity.engines:
            return []
        for rollout, turn, plan_state in await _read_due(session):
            policy = await session.get_one(Policy, rollout.policy_id)
            version = await session.get_one(Version, turn.version_id)
            reason = _find_skip_reason(capacity, version, plan_state)
            if reason is not None:
                skipped.append((rollout.id, rollout.fence, reason))
                continue
            engine = capacity.choose_engine(policy, version, settings, turn.engine)
            if engine is None or plan_state == PlanState.PAUSED:
                continue
            max_tokens = int(turn.sampling.get("max_tokens") or settings.max_output_tokens)
            budget = policy.id, rollout.origin
            if budget not in budgets:
                budgets[budget] = await _read_budget(session, policy, rollout.origin, settings)
            if max_tokens > budgets[budget]:
                skipped.append((rollout.id, rollout.fence, OUT_OF_BUDGET))
                continue
            lease = await _claim(session, settings, owner, rollout, engine, max_tokens)
            if lease is not None:
                capacity.num_rollouts[engine.name, policy.id] += 1
                claimed.append(lease)
                budgets[budget] -= max_tokens
    for id, fence, reason in skipped:
        await _skip(db, settings, id, fence, reason)
    return claimed


async def _read_due(session: AsyncSession) -> list[tuple[Rollout, Turn, str | None]]:
    """Return due rollouts with their turns and plan states, policy by policy under the policy's lock.

    Without the lock two workers that count at the same time would both spend the last of the budget. The lock comes
    first and no turn is locked, because an erasure locks policies, turns and rollouts in this order.
    """
    due: list[tuple[Rollout, Turn, str | None]] = []
    for policy_id in sorted(await session.scalars(select(Rollout.policy_id).where(IS_DUE).distinct())):
        await session.execute(select(Policy.id).where(Policy.id == policy_id).with_for_update(key_share=True))
        rows = await session.execute(
            select(Rollout, Turn, RolloutPlan.state)
            .join(Turn, Turn.id == Rollout.id)
            .outerjoin(RolloutPlan, RolloutPlan.id == Rollout.plan_id)
            .where(IS_DUE, Rollout.policy_id == policy_id)
            .order_by(Rollout.due_at, Turn.completion_id, Turn.choice_index)
            .limit(MAX_ROWS_PER_POLICY)
            .with_for_update(of=Rollout, skip_locked=True)
        )
        due += [(rollout, turn, plan_state) for rollout, turn, plan_state in rows]
    return due


def _find_skip_reason(capacity: EngineCapacity, version: Version, plan_state: str | None) -> str | None:
    if plan_state in (PlanState.CANCELLED, PlanState.FAILED):
        return PLAN_ENDED
    # While an engine swaps its weights, nobody knows which version it will have.
    is_swapping = any(engine.swapping_until is not None for engine in capacity.engines)
    return None if is_swapping or capacity.engines_with(version) else VERSION_GONE


async def _read_budget(session: AsyncSession, policy: Policy, origin: str, settings: Settings) -> float:
    """Return the tokens that are left in this hour. A plan has no budget: the space in a batch limits its replies."""
    if origin == Origin.GROUP_SAMPLE:
        limit = effective_rollouts(policy, settings).group_sampling.tokens_per_hour
    elif origin == Origin.SHADOW:
        limit = shadow.active_shadow_config(policy, settings).tokens_per_hour
    else:
        return math.inf
    return limit - await repository.count_recent_tokens(session, policy.id, Origin(origin))


async def _claim(
    session: AsyncSession, settings: Settings, owner: str, rollout: Rollout, engine: Engine, max_tokens: int
) -> RolloutLease | None:
    lease = await claim_row(session, Rollout, rollout, owner=owner, settings=settings)
    if lease is None:
        return None
    reserve = update(Rollout).where(Rollout.id == rollout.id).values(tokens=max_tokens, engine=engine.name)
    await session.execute(reserve.execution_options(synchronize_session=False))
    return RolloutLease(lease.id, lease.fence, lease.attempt, engine.name, engine.url)


async def skip_expired(db: Database, settings: Settings) -> None:
    """Skip rollouts that were not claimed in time, and those of plans that have ended."""
    async with db.read() as session:
        plan_has_ended = exists().where(
            RolloutPlan.id == Rollout.plan_id, RolloutPlan.state.in_((PlanState.CANCELLED, PlanState.FAILED))
        )
        result = await session.execute(
            select(Rollout.id, Rollout.fence, Rollout.expires_at < now())
            .where(
                Rollout.state == RolloutState.OPEN,
                lease_is_free(Rollout),
                or_(Rollout.expires_at < now(), plan_has_ended),
            )
            .limit(MAX_ROWS_PER_POLICY)
        )
        rows = [(id, fence, EXPIRED if is_expired else PLAN_ENDED) for id, fence, is_expired in result]
    for id, fence, reason in rows:
        await _skip(db, settings, id, fence, reason)


async def _skip(db: Database, settings: Settings, id: str, fence: int, reason: str) -> None:
    with suppress(LeaseLost):  # another worker has claimed it meanwhile
        async with db.write() as session:
            await record_rollout.record_no_reply(session, settings, id, fence, RolloutState.SKIPPED, reason)
