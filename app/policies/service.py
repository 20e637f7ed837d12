"""Policies by name, their audit entries, and which engines have which version loaded."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import exists, null, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.errors import Conflict, require_row
from app.core.leases import lease_is_free
from app.core.settings import Settings
from app.models import (
    ANSWERING,
    SERVED_TRAFFIC,
    AuditAction,
    Engine,
    EngineState,
    Policy,
    Version,
    VersionState,
    record_audit,
)
from app.policies import repository
from app.policies.locks import LockedPolicy
from app.policies.references import version_name


class Attribution(NamedTuple):
    """Who makes a change, and why: what the audit log keeps of it."""

    actor: str
    reason: str | None


async def get_policy(session: AsyncSession, project_id: str, name: str) -> Policy:
    """Return the policy. Raises NotFound."""
    policy = await repository.find_policy(session, project_id, name)
    return require_row(policy, f"There is no policy named '{name}'.", code="model_not_found", param="model")


def audit_policy(
    session: AsyncSession,
    policy: Policy,
    action: AuditAction,
    actor: str,
    reason: str | None = None,
    /,
    *,
    subject: Version | str | None = None,
    **details: Any,
) -> None:
    """Add an audit entry about the policy, or about its `subject`: a version, or what is named so."""
    name = version_name(policy, subject) if isinstance(subject, Version) else subject or policy.name
    record_audit(session, actor, action, name, reason, project_id=policy.project_id, **details)


async def reset_override(locked: LockedPolicy, column: str, *, actor: str) -> None:
    """Clear the override in `column` (such as "rewards"), so that the deployment's setting applies again."""
    session, policy = locked
    if getattr(policy, column) is None:
        return
    setattr(policy, column, null())  # None would be stored as JSON null
    await session.flush()
    await session.refresh(policy)
    audit_policy(session, policy, AuditAction(f"{column}.reset"), actor)


async def list_loaded_versions(session: AsyncSession, project_id: str) -> list[tuple[Policy, Version]]:
    """Return the versions that a request may name as `policy@vN`: they served traffic, and a ready engine has them."""
    engines = await list_ready_engines(session)
    held = {name for engine in engines for name in (*engine.loaded, engine.weights) if name is not None}
    rows = await session.execute(
        select(Policy, Version)
        .join(Version, Version.policy_id == Policy.id)
        .where(Policy.project_id == project_id, Policy.state.in_(ANSWERING), Version.state.in_(SERVED_TRAFFIC))
        .where(or_(Version.adapter_name.in_(held), Version.number == 0))  # version 0 is the base model
        .order_by(Policy.name, Version.number)
    )
    return [(policy, version) for policy, version in rows if any(is_loaded(engine, version) for engine in engines)]


async def list_ready_engines(session: AsyncSession, *, lock: bool = False) -> list[Engine]:
    """Return the ready engines, by name. With `lock`, their rows stay as they are until the transaction ends."""
    query = select(Engine).where(Engine.state == EngineState.READY).order_by(Engine.name)
    if lock:
        query = query.with_for_update(read=True).execution_options(populate_existing=True)
    return list(await session.scalars(query))


def is_loaded(engine: Any, version: Any) -> bool:
    """Whether the engine can serve the version: two objects with the attributes of Engine and of Version.

    The engine's own weights are the version's base or full weights, no weight swap is under way, and the engine has
    loaded the version's adapter, if the version is one.
    """
    if engine.swapping_until is not None or engine.weights != version.weights:
        return False
    return version.adapter is None or version.adapter in engine.loaded


def has_quorum(holders: Sequence[Engine], engines: Sequence[Engine]) -> bool:
    """Whether `holders` are at least half of the ready `engines`, and at least one.

    A replica that is slow or hangs must not delay the others: requests go to the engines that have the version.
    """
    return bool(holders) and 2 * len(holders) >= len(engines)


def is_loaded_on_quorum(version: Version, engines: Sequence[Engine]) -> bool:
    """Whether enough of these engines have loaded the version for it to serve."""
    return has_quorum([engine for engine in engines if is_loaded(engine, version)], engines)


async def is_verifying(session: AsyncSession, engine: Engine) -> bool:
    """Whether the engine holds full weights that are being verified, or that are verified and about to go live."""
    pending = or_(
        Version.state == VersionState.VERIFIED, (Version.state == VersionState.TRAINED) & ~lease_is_free(Version)
    )
    query = select(exists().where(Version.adapter_name == engine.weights, Version.full_weights, pending))
    return engine.swapping_until is None and bool(await session.scalar(query))


def require_files(policy: Policy, version: Version) -> None:
    """Raise Conflict for a version whose files are deleted: no engine can load it any more."""
    if version.pruned_at is not None:
        message = f"The files of {version_name(policy, version)} are deleted: it can no longer be deployed."
        raise Conflict(message, code="version_pruned")


def require_adapters(settings: Settings, feature: str) -> None:
    """Raise Conflict where versions are full weights: `feature` needs several versions on one engine."""
    if settings.trainer.adaptation == "full":
        message = f"{feature} needs several versions on one engine, and an engine holds one version of full weights."
        raise Conflict(message, code="full_weights")
