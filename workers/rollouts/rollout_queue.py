"""Rollouts that wait: created as rows, claimed while engines have capacity beside chats and budget is left, closed."""

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from sqlalchemy import exists, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.json_values import as_integer
from app.chat.new_turn import NewTurn
from app.core.database import Database, now
from app.core.jobs import enqueue_after_commit
from app.core.leases import LeaseLost, lease_is_free
from app.core.settings import Settings
from app.deployments import comparison
from app.engines import fleet
from app.models import (
    REQUESTED,
    Engine,
    Origin,
    PlanState,
    Policy,
    Rollout,
    RolloutPlan,
    RolloutState,
    Turn,
    TurnState,
    Version,
)
from app.policies.locks import lock_policy
from app.training import rollouts
from app.training.policy_config import effective_rollouts
from workers.feedback import rewards, sample_groups
from workers.queue.leased_job import claim_row, finish_row, is_due, sanitize_text

MAX_ROWS_PER_POLICY = 32  # read at once: a long queue of one policy must not hide the others
CHAT_SECONDS = 120.0  # after that an open chat is considered lost
# Why a rollout is skipped.
EXPIRED = "no engine had capacity for it in time"
VERSION_GONE = "no engine has its version loaded any more"
OUT_OF_BUDGET = "the hourly budget is spent"
PLAN_ENDED = "its plan has ended"
NOT_SAMPLED = "not_sampled"  # the finish reason of a turn that was planned and never sampled


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
            .where(Turn.state == TurnState.OPEN, Turn.origin.in_(REQUESTED), Turn.created_at > now() - CHAT_SECONDS)
            .group_by(Turn.engine)
        )
        rollouts = await session.execute(
            select(Rollout.engine, Rollout.policy_id, func.count())
            .where(Rollout.state == RolloutState.OPEN, Rollout.lease_until > now())
            .group_by(Rollout.engine, Rollout.policy_id)
        )
        return cls(
            await fleet.list_ready_engines(session),
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
        load = {engine: self.num_rollouts[engine.name, policy.id] for engine in candidates}
        return min(candidates, key=lambda engine: (engine.name != preferred, load[engine]), default=None)

    def engines_with(self, version: Version) -> list[Engine]:
        """Return the engines that have the version loaded."""
        return [engine for engine in self.engines if fleet.is_loaded(engine, version)]


async def create_rollouts(
    session: AsyncSession, turns: Sequence[NewTurn], *, expires_in: float, **plan_values: object
) -> None:
    """Insert planned turns and their rollouts, and enqueue the rollout task.

    `expires_in` is in seconds, `plan_values` are the rollouts' columns of a plan.
    """
    await session.execute(insert(Turn), [turn.columns() for turn in turns])
    rows = [
        {
            "id": turn.id,
            "policy_id": turn.policy_id,
            "origin": turn.origin,
            "choice_index": turn.choice_index,
            "state": RolloutState.OPEN,
            **plan_values,
        }
        for turn in turns
    ]
    await session.execute(insert(Rollout).values(due_at=now(), expires_at=now() + expires_in), rows)
    enqueue_after_commit(session, "rollout")


async def claim_rollouts(db: Database, settings: Settings, owner: str) -> list[tuple[Rollout, Engine]]:
    """Claim due rollouts while the engines have capacity. Skip those that must not be sampled any more.

    Returns each rollout with the engine that samples it.
    """
    async with db.read() as session:  # a read blocks nobody; on SQLite a write blocks other writers
        if not await session.scalar(select(exists().where(is_due(Rollout)))):
            return []
    claimed: list[tuple[Rollout, Engine]] = []
    skipped: list[tuple[Rollout, str]] = []
    budgets: dict[tuple[str, str], float] = {}  # tokens left by (policy id, origin)
    async with db.write() as session:
        capacity = await EngineCapacity.read(session)
        if not capacity.engines:
            return []
        for rollout, turn, plan_state in await _read_due(session):
            policy = await session.get_one(Policy, rollout.policy_id)
            version = await session.get_one(Version, turn.version_id)
            if (reason := _find_skip_reason(capacity, version, plan_state)) is not None:
                skipped.append((rollout, reason))
                continue
            engine = capacity.choose_engine(policy, version, settings, turn.engine)
            if engine is None or plan_state == PlanState.PAUSED:
                continue
            max_tokens = as_integer(turn.sampling.get("max_tokens") or settings.server.default_max_tokens)
            budget = policy.id, rollout.origin
            if budget not in budgets:
                budgets[budget] = await _read_budget(session, policy, rollout.origin, settings)
            if max_tokens > budgets[budget]:
                skipped.append((rollout, OUT_OF_BUDGET))
            elif await claim_row(session, rollout, owner, settings):
                rollout.tokens, rollout.engine = max_tokens, engine.name
                capacity.num_rollouts[engine.name, policy.id] += 1
                budgets[budget] -= max_tokens
                claimed.append((rollout, engine))
    await _skip(db, settings, skipped)
    return claimed


async def _read_due(session: AsyncSession) -> list[tuple[Rollout, Turn, str | None]]:
    """Return due rollouts with their turns and plan states, policy by policy under the policy's lock.

    Without the lock two workers that count at the same time would both spend the last of the budget. The lock comes
    first and no turn is locked, because an erasure locks policies, turns and rollouts in this order.
    """
    due: list[tuple[Rollout, Turn, str | None]] = []
    for policy_id in sorted(await session.scalars(select(Rollout.policy_id).where(is_due(Rollout)).distinct())):
        await lock_policy(session, policy_id)
        rows = await session.execute(
            select(Rollout, Turn, RolloutPlan.state)
            .join(Turn, Turn.id == Rollout.id)
            .outerjoin(RolloutPlan, RolloutPlan.id == Rollout.plan_id)
            .where(is_due(Rollout), Rollout.policy_id == policy_id)
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
        limit = comparison.active_shadow_config(policy, settings).tokens_per_hour
    else:
        return math.inf
    return limit - await rollouts.count_recent_tokens(session, policy.id, Origin(origin))


async def skip_expired(db: Database, settings: Settings) -> None:
    """Skip rollouts that were not claimed in time, and those of plans that have ended."""
    plan_has_ended = exists().where(
        RolloutPlan.id == Rollout.plan_id, RolloutPlan.state.in_((PlanState.CANCELLED, PlanState.FAILED))
    )
    is_expired = Rollout.expires_at < now()
    async with db.read() as session:
        rows = await session.execute(
            select(Rollout, is_expired)
            .where(Rollout.state == RolloutState.OPEN, lease_is_free(Rollout), or_(is_expired, plan_has_ended))
            .order_by(Rollout.expires_at, Rollout.id)
            .limit(MAX_ROWS_PER_POLICY)
        )
        skipped = [(rollout, EXPIRED if expired else PLAN_ENDED) for rollout, expired in rows]
    await _skip(db, settings, skipped)


async def _skip(db: Database, settings: Settings, skipped: Sequence[tuple[Rollout, str]]) -> None:
    for rollout, reason in skipped:
        with suppress(LeaseLost):  # another worker has claimed it meanwhile
            async with db.write() as session:
                await close_rollout(session, settings, rollout, RolloutState.SKIPPED, reason)


async def close_rollout(session: AsyncSession, settings: Settings, rollout: Rollout, state: str, reason: str) -> None:
    """Record that the rollout was skipped or failed: the samples of its group no longer wait for it.

    Raises LeaseLost.
    """
    await sample_groups.lock_groups(session, [rollout.id])
    await finish_row(session, rollout, state, reason, tokens=0)
    await session.execute(
        update(Turn)
        .where(Turn.id == rollout.id, Turn.state == TurnState.OPEN)
        .values(
            state=TurnState.FAILED if state == RolloutState.FAILED else TurnState.ABORTED,
            finish_reason=NOT_SAMPLED,
            exclusion_reason=func.coalesce(Turn.exclusion_reason, sanitize_text(reason)),
            finished_at=now(),
            processed=True,
        )
    )
    await rewards.update_turn_samples(session, {rollout.id}, settings)
    enqueue_after_commit(session, "judge")
