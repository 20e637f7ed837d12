"""Which versions each engine holds, and which it should hold. Rows are written under the engine's incarnation."""

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.engines import episode_pins, load_errors
from app.models import ANSWERING, ONCE_LIVE, PENDING_RELEASE, Deployment, Engine, Pin, Policy, Version


async def wanted_versions(session: AsyncSession, keep: int) -> list[Version]:
    """Return the adapter versions of policies that answer chats that every engine should hold, by number.

    These are the versions that users or rollbacks may ask for: serving, previous, canary, pinned, pending release, and
    of each policy the last `keep` that served, and the last `keep` that open episodes are pinned to.
    """
    ids: set[str | None] = set(await session.scalars(select(Pin.version_id).distinct()))
    ids |= set(await session.scalars(select(Version.id).where(Version.state.in_(PENDING_RELEASE))))
    deployments = await session.execute(
        select(
            Deployment.policy_id, Deployment.version_id, Deployment.previous_version_id, Deployment.canary_version_id
        )
    )
    for policy_id, *deployed in deployments.all():
        ids |= set(deployed)
        recent = await session.scalars(
            select(Version.id)
            .where(
                Version.policy_id == policy_id,
                Version.state.in_(ONCE_LIVE),
                Version.live_at.is_not(None),  # excludes versions that were only ever a canary
            )
            .order_by(Version.live_at.desc(), Version.number.desc())
            .limit(keep)
        )
        ids |= set(recent)
        ids |= set(await session.scalars(episode_pins.select_pinned_versions(policy_id).limit(keep)))
    rows = await session.scalars(
        select(Version)
        .join(Policy, Policy.id == Version.policy_id)
        .where(Version.id.in_(ids - {None}), Version.adapter.is_not(None))
        .where(Policy.state.in_(ANSWERING))
        .order_by(Version.number, Version.id)
    )
    return list(rows)


async def serving_adapter_names(session: AsyncSession) -> set[str]:
    """Return the adapter names of the versions that the deployments serve.

    Canaries are not among them: an engine may take traffic without one, and users in the canary's share are answered
    by the serving version then.
    """
    rows = await session.scalars(
        select(Version.adapter_name)
        .join(Deployment, Deployment.version_id == Version.id)
        .join(Policy, Policy.id == Version.policy_id)
        .where(Version.adapter.is_not(None), Policy.state.in_(ANSWERING))
    )
    return {name for name in rows if name is not None}


async def serving_version(session: AsyncSession) -> Version:
    """Return the serving version of the one policy that exists where full weights are trained."""
    statement = select(Version).join(Deployment, Deployment.version_id == Version.id).order_by(Deployment.policy_id)
    return (await session.scalars(statement.limit(1))).one()


async def version_with_weights(session: AsyncSession, policy_id: str, weights: str | None) -> Version:
    """Return the version that these full weights belong to; None stands for the base model, which is version 0."""
    matches = Version.number == 0 if weights is None else Version.adapter_name == weights
    return (await session.scalars(select(Version).where(Version.policy_id == policy_id, matches))).one()


async def lock_engine(session: AsyncSession, engine: Engine) -> Engine | None:
    """Lock the engine's row until the transaction ends. Return None if it was restarted since `engine` was read."""
    current = await session.get(Engine, engine.name, populate_existing=True, with_for_update=True)
    return current if current is not None and current.incarnation == engine.incarnation else None


async def record_adapters(
    session: AsyncSession, engine: Engine, *, added: str | None = None, removed: str | None = None
) -> None:
    """Record that an adapter was loaded or unloaded, unless the engine was restarted since it was read."""
    if (current := await lock_engine(session, engine)) is not None:
        loaded = {*current.loaded, added} if added else set(current.loaded)
        current.loaded = sorted(loaded - {removed})
        load_errors.clear(current, {name for name in (added, removed) if name is not None})


async def record_load_error(session: AsyncSession, engine: Engine, adapter: str, error: str) -> None:
    """Record why an adapter could not be loaded, unless the engine was restarted since it was read."""
    if (current := await lock_engine(session, engine)) is not None:
        load_errors.record(current, adapter, error)


async def clear_load_errors(session: AsyncSession, engine: Engine, adapters: set[str]) -> None:
    """Remove the errors of adapters that the engine no longer has to load."""
    if (current := await lock_engine(session, engine)) is not None:
        load_errors.clear(current, adapters)
