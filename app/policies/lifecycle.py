"""Policies of a project beyond its first: another policy over the same base model, and changes of its own settings."""

from collections.abc import Mapping

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.errors import BadRequest, Conflict
from app.core.settings import Settings
from app.models import ANSWERING, AuditAction, Policy, PolicyState, Project
from app.policies import override_checks, repository
from app.policies.locks import LockedPolicy, lock_policy
from app.policies.overrides import leaf_paths, own_values, set_own_values
from app.policies.service import Attribution, audit_policy
from app.projects.service import create_policy


async def create(
    session: AsyncSession,
    project_id: str,
    name: str,
    own: Mapping[str, object],
    by: Attribution,
    settings: Settings,
    *,
    limit: int | None,
) -> LockedPolicy:
    """Add a policy over the deployment's base model, whose version 0 serves at once.

    `limit` is the most policies of the project. Raises BadRequest for settings that a policy cannot have, Conflict.
    """
    values = override_checks.merge({}, own, settings)
    # Names and the limit are checked one by one.
    await session.get_one(Project, project_id, with_for_update={"key_share": True})
    if await repository.find_policy(session, project_id, name) is not None:
        raise Conflict(f"There is a policy '{name}' already.", code="policy_exists", param="name")
    existing = (Policy.project_id == project_id, Policy.state != PolicyState.DELETED)
    count = await session.scalar(select(func.count()).where(*existing)) or 0
    if limit is not None and count >= limit:
        message = f"This project has {count} policies, and may have {limit} (limits.policies)."
        raise Conflict(message, code="project_limit")
    policy = await create_policy(session, project_id, name, settings.model)
    set_own_values(policy, values)
    await session.flush()
    locked = await lock_policy(session, policy.id)
    audit_policy(session, policy, AuditAction.POLICY_CREATED, *by, settings=sorted(leaf_paths(values)))
    return locked


async def change_settings(
    locked: LockedPolicy, patch: Mapping[str, object], by: Attribution, settings: Settings
) -> None:
    """Change the policy's own settings value by value; they hold for its next batch, update and release.

    Raises BadRequest, as `override_checks.merge` does.
    """
    session, policy = locked
    before = own_values(policy)
    after = override_checks.merge(before, patch, settings)
    if after == before:
        return
    set_own_values(policy, after)
    await session.flush()
    await session.refresh(policy)
    paths = sorted(set(leaf_paths(patch)))
    audit_policy(session, policy, AuditAction.POLICY_UPDATED, *by, settings=paths)


async def require_fitting_settings(session: AsyncSession, settings: Settings) -> None:
    """Raise ValueError if the own settings of a policy no longer fit the deployment's, which have changed."""
    has_own = (Policy.settings.is_not(None), Policy.state.in_(ANSWERING))
    for policy in await session.scalars(select(Policy).where(*has_own).order_by(Policy.name)):
        try:
            override_checks.check(own_values(policy), settings)
        except BadRequest as error:
            raise ValueError(
                f"the own settings of policy '{policy.name}' do not fit those of this deployment: {error.message} "
                f"Restore the deployment's setting, change the policy's (PATCH /v1/policies/{policy.name}), and then it"
            ) from error
