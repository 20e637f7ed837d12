"""Policies by name, their audit entries, and what a version must have to be deployed."""

from typing import Any, NamedTuple

from sqlalchemy import null, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.errors import Conflict, require_row
from app.engines import fleet
from app.models import (
    ANSWERING,
    SERVED_TRAFFIC,
    AuditAction,
    Policy,
    Version,
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
    engines = await fleet.list_ready_engines(session)
    held = {name for engine in engines for name in (*engine.loaded, engine.weights) if name is not None}
    rows = await session.execute(
        select(Policy, Version)
        .join(Version, Version.policy_id == Policy.id)
        .where(Policy.project_id == project_id, Policy.state.in_(ANSWERING), Version.state.in_(SERVED_TRAFFIC))
        .where(or_(Version.adapter_name.in_(held), Version.number == 0))  # version 0 is the base model
        .order_by(Policy.name, Version.number)
    )
    return [
        (policy, version) for policy, version in rows if any(fleet.is_loaded(engine, version) for engine in engines)
    ]


def require_files(policy: Policy, version: Version) -> None:
    """Raise Conflict for a version whose files are deleted: no engine can load it any more."""
    if version.pruned_at is not None:
        message = f"The files of {version_name(policy, version)} are deleted: it can no longer be deployed."
        raise Conflict(message, code="version_pruned")
