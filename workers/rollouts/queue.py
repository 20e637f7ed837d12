"""Which rollouts may be asked now: an engine holds the version, people leave it alone, and the hour's budget lasts."""

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from sqlalchemy import and_, exists, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.core import leases
from app.core.database import Database, now
from app.core.leases import LeaseLost, lease_is_free
from app.core.settings import Settings
from app.deployments import shadow
from app.models import Engine, Origin, PlanState, Policy, Rollout, RolloutPlan, RolloutState, Turn, TurnState, Version
from app.policies import service
from app.training.rollouts import repository
from app.training.rollouts.config import rollouts_of
from workers.rollouts import record_result

AT_ONCE = 32  # looked at, of one policy: a long line of one is not to hide the others
BUSY_SECONDS = 120.0  # after that an open chat is taken for lost
TOO_LATE = "no engine had room for it in time"
VERSION_GONE = "no engine holds its version any more"
OUT_OF_BUDGET = "the budget of the hour is spent"
PLAN_ENDED = "its plan has ended"
UNDER_WAY = and_(Rollout.state == RolloutState.OPEN, Rollout.lease_until > now())
DUE = and_(Rollout.state == RolloutState.OPEN, Rollout.due_at <= now(), lease_is_free(Rollout))


@dataclass(frozen=True)
class Claim:
    """A rollout that is ours until its lease runs out, and the engine that is to be asked."""

    id: str
    fence: int
    attempt: int
    engine: str
    url: str


@dataclass(frozen=True)
class Room:
    """Of the engines that are ready: open chats, and rollouts under way by policy."""

    engines: Sequence[Engine]
    chats: Counter[str]
    flying: Counter[tuple[str, str]]

    @classmethod
    async def of(cls, session: AsyncSession) -> "Room":
        chats = await session.execute(
            select(Turn.engine, func.count())
            .where(Turn.state == TurnState.OPEN, Turn.origin == Origin.CHAT, Turn.created_at > now() - BUSY_SECONDS)
            .group_by(Turn.engine)
        )
        flying = await session.execute(
            select(Rollout.engine, Rollout.policy_id, func.count())
            .where(UNDER_WAY)
            .group_by(Rollout.engine, Rollout.policy_id)
        )
        return cls(
            await service.ready_engines(session),
            Counter({name: count for name, count in chats}),
            Counter({(str(name), policy_id): count for name, policy_id, count in flying}),
        )

    def for_one(self, policy: Policy, version: Version, settings: Settings, first: str | None = None) -> Engine | None:
        """The one named `first` if it has room: it has the prompt in its cache."""
        config = rollouts_of(policy, settings)
        fit = [
            engine
            for engine in self.holders(version)
            if self.chats[engine.name] <= config.most_chats and self.flying[engine.name, policy.id] < config.in_flight
        ]
        return min(fit, key=lambda one: (one.name != first, self.flying[one.name, policy.id]), default=None)

    def holders(self, version: Version) -> list[Engine]:
        return [engine for engine in self.engines if service.holds(engine, version)]


async def take(db: Database, settings: Settings, owner: str) -> list[Claim]:
    """Claim what is due, as far as there is room. What there is no reason to ask for any more is settled."""
    async with db.read() as session:  # a look costs people nothing; a write may
        if not await session.scalar(select(exists().where(DUE))):
            return []
    taken: list[Claim] = []
    over: list[tuple[str, int, str]] = []
    left: dict[tuple[str, str], float] = {}  # of each policy's budgets
    async with db.write() as session:
        room = await Room.of(session)
        if not room.engines:
            return []
        for rollout, turn, plan_state in await _due(session):
            policy = await session.get_one(Policy, rollout.policy_id)
            version = await session.get_one(Version, turn.version_id)
            why = _why_not(room, version, plan_state)
            if why is not None:
                over.append((rollout.id, rollout.fence, why))
                continue
            engine = room.for_one(policy, version, settings, turn.engine)
            if engine is None or plan_state == PlanState.PAUSED:
                continue
            tokens = int(turn.sampling.get("max_tokens") or settings.max_output_tokens)
            budget = policy.id, rollout.origin
            if budget not in left:
                left[budget] = await _budget(session, policy, rollout.origin, settings)
            if tokens > left[budget]:
                over.append((rollout.id, rollout.fence, OUT_OF_BUDGET))
                continue
            claim = await _claim(session, settings, owner, rollout, engine, tokens)
            if claim is not None:
                room.flying[engine.name, policy.id] += 1
                taken.append(claim)
                left[budget] -= tokens
    for id, fence, why in over:
        await give_up(db, settings, id, fence, why)
    return taken


async def _due(session: AsyncSession) -> list[tuple[Rollout, Turn, str | None]]:
    """By policy, under its lock: two workers that count at the same time would both find the last of the budget. The
    lock comes first, and no turn is locked: whoever erases takes policies, turns and rollouts, in this order."""
    found: list[tuple[Rollout, Turn, str | None]] = []
    for policy_id in sorted(await session.scalars(select(Rollout.policy_id).where(DUE).distinct())):
        await session.execute(select(Policy.id).where(Policy.id == policy_id).with_for_update(key_share=True))
        rows = await session.execute(
            select(Rollout, Turn, RolloutPlan.state)
            .join(Turn, Turn.id == Rollout.id)
            .outerjoin(RolloutPlan, RolloutPlan.id == Rollout.plan_id)
            .where(DUE, Rollout.policy_id == policy_id)
            .order_by(Rollout.due_at, Turn.completion_id, Turn.choice_index)
            .limit(AT_ONCE)
            .with_for_update(of=Rollout, skip_locked=True)
        )
        found += [(rollout, turn, plan_state) for rollout, turn, plan_state in rows]
    return found


def _why_not(room: Room, version: Version, plan_state: str | None) -> str | None:
    if plan_state in (PlanState.CANCELLED, PlanState.FAILED):
        return PLAN_ENDED
    moving = any(engine.swapping_until is not None for engine in room.engines)  # whose weights it will have, time tells
    return None if moving or room.holders(version) else VERSION_GONE


async def _budget(session: AsyncSession, policy: Policy, origin: str, settings: Settings) -> float:
    """A plan has none: a batch has room for so many of its replies and no more."""
    if origin == Origin.GROUP_SAMPLE:
        most = rollouts_of(policy, settings).group_sampling.tokens_per_hour
    elif origin == Origin.SHADOW:
        most = shadow.kept(policy, settings).tokens_per_hour
    else:
        return math.inf
    return most - await repository.spent(session, policy.id, Origin(origin))


async def _claim(
    session: AsyncSession, settings: Settings, owner: str, rollout: Rollout, engine: Engine, tokens: int
) -> Claim | None:
    fence = await leases.claim(
        session, Rollout, rollout.id, owner=owner, seconds=settings.lease_seconds, states=(RolloutState.OPEN,)
    )
    if fence is None:
        return None
    told = update(Rollout).where(Rollout.id == rollout.id).values(tokens=tokens, engine=engine.name)
    await session.execute(told.execution_options(synchronize_session=False))
    return Claim(rollout.id, fence, rollout.attempt + 1, engine.name, engine.url)


async def drop(db: Database, settings: Settings) -> None:
    """What was not asked for in time is not waited for any longer."""
    async with db.read() as session:
        ended = exists().where(
            RolloutPlan.id == Rollout.plan_id, RolloutPlan.state.in_((PlanState.CANCELLED, PlanState.FAILED))
        )
        late = await session.execute(
            select(Rollout.id, Rollout.fence, Rollout.expires_at < now())
            .where(Rollout.state == RolloutState.OPEN, lease_is_free(Rollout), or_(Rollout.expires_at < now(), ended))
            .limit(AT_ONCE)
        )
        rows = [(id, fence, TOO_LATE if expired else PLAN_ENDED) for id, fence, expired in late]
    for id, fence, why in rows:
        await give_up(db, settings, id, fence, why)


async def give_up(db: Database, settings: Settings, id: str, fence: int, why: str) -> None:
    with suppress(LeaseLost):  # somebody has taken it meanwhile: it is theirs
        async with db.write() as session:
            await record_result.closed(session, settings, id, fence, RolloutState.SKIPPED, why)
