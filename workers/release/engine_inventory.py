"""Which versions each engine holds, and which it should: written under the engine's incarnation."""

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import now
from app.models import ONCE_LIVE, PENDING_RELEASE, Deployment, Engine, EngineState, Pin, Version


async def wanted(session: AsyncSession, keep: int) -> list[Version]:
    """Serving, previous, the canary, pinned, on their way home, and the last few that served: what people or rollbacks
    may ask for."""
    pointed = await session.execute(
        select(Deployment.version_id, Deployment.previous_version_id, Deployment.canary_version_id)
    )
    ids = {id for row in pointed for id in row if id is not None}
    ids |= set(await session.scalars(select(Pin.version_id).distinct()))
    coming = await session.scalars(select(Version.id).where(Version.state.in_(PENDING_RELEASE)))
    policies = await session.scalars(select(Deployment.policy_id))
    for policy_id in list(policies):
        recent = await session.scalars(
            select(Version.id)
            .where(
                Version.policy_id == policy_id,
                Version.state.in_(ONCE_LIVE),
                Version.live_at.is_not(None),  # not what was only ever a canary
            )
            .order_by(Version.live_at.desc())
            .limit(keep)
        )
        ids |= set(recent)
    rows = await session.scalars(
        select(Version)
        .where(Version.id.in_(ids | set(coming)), Version.adapter_name.is_not(None), ~Version.full_weights)
        .order_by(Version.number)
    )
    return list(rows)


async def serving(session: AsyncSession) -> set[str]:
    """Adapter names of the versions that the pointers point to. Without a canary an engine may open: whoever is in its
    share is answered by what serves then."""
    rows = await session.scalars(
        select(Version.adapter_name)
        .join(Deployment, Deployment.version_id == Version.id)
        .where(Version.adapter_name.is_not(None), ~Version.full_weights)
    )
    return {name for name in rows if name is not None}


async def pointed(session: AsyncSession) -> Version:
    """What serves, where all weights are trained: then there is one policy."""
    asked = select(Version).join(Deployment, Deployment.version_id == Version.id).order_by(Deployment.policy_id)
    return (await session.scalars(asked.limit(1))).one()


async def having(session: AsyncSession, policy_id: str, weights: str | None) -> Version:
    """The version whose full weights those are; version 0 for the base model's own."""
    mine = Version.number == 0 if weights is None else Version.adapter_name == weights
    return (await session.scalars(select(Version).where(Version.policy_id == policy_id, mine))).one()


async def locked(session: AsyncSession, engine: Engine) -> Engine | None:
    """What it holds stays as it is until the transaction ends. None when it was restarted since `engine` was read."""
    current = await session.get(Engine, engine.name, populate_existing=True, with_for_update=True)
    return current if current is not None and current.incarnation == engine.incarnation else None


async def note(session: AsyncSession, engine: Engine, *, added: str | None = None, removed: str | None = None) -> bool:
    """Note a load or an unload. False when the engine was restarted since `engine` was read."""
    current = await locked(session, engine)
    if current is None:
        return False
    loaded = set(current.loaded) | ({added} if added else set())
    current.loaded = sorted(loaded - ({removed} if removed else set()))
    return True


async def starting(session: AsyncSession, name: str, url: str) -> int:
    engine = await session.get(Engine, name, with_for_update=True)
    if engine is None:
        engine = Engine(name=name, url=url, state=EngineState.STARTING, incarnation=0, loaded=[])
        session.add(engine)
    engine.url, engine.state, engine.loaded, engine.reason = url, EngineState.STARTING, [], None
    engine.weights = engine.swapping_until = None
    engine.incarnation += 1
    return engine.incarnation


async def set_state(
    session: AsyncSession, name: str, incarnation: int, state: EngineState, reason: str | None = None
) -> bool:
    done = await session.execute(
        update(Engine)
        .where(Engine.name == name, Engine.incarnation == incarnation)
        .values(state=state, reason=reason, heartbeat_at=now())
    )
    return bool(done.rowcount)  # type: ignore[attr-defined]
