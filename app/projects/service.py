"""Projects and their API keys: the first start, creation by the operator of the machine, and the consent to train.

At the first start there is one project, one key (shown once), and one policy whose version 0 is the base model. A
refusal to train by the key, by the project or by the request is final. A key is shown once and stored as a hash.
"""

import hashlib
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, or_, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import now
from app.core.errors import BadRequest, Conflict, require_row
from app.core.pagination import apply_keyset
from app.core.project_limits import ProjectLimits
from app.models import (
    ApiKey,
    AuditAction,
    Deployment,
    Policy,
    Project,
    Turn,
    Version,
    VersionState,
    new_id,
    record_audit,
)
from app.projects.scopes import PROGRAMS_SCOPE

ALL_RIGHTS = ("chat", "feedback", PROGRAMS_SCOPE, "admin")  # the scopes that include all others
DEFAULT_PROJECT = "default"
BOOTSTRAP_LOCK = 20261121  # a PostgreSQL advisory lock
CONSENT = "attune_train"  # a key of the request's metadata
NO_CONSENT = "no consent to train"  # an exclusion reason
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")


async def bootstrap(session: AsyncSession, policy_name: str, model: str) -> str | None:
    """Create what is missing. Returns the key if one was created.

    Raises ValueError when the policy has another base model.
    """
    model = resolve_base_model(model)
    if session.get_bind().dialect.name == "postgresql":  # several processes may start at the same time
        await session.execute(text(f"SELECT pg_advisory_xact_lock({BOOTSTRAP_LOCK})"))
    project = await find_project(session, DEFAULT_PROJECT) or await _add_project(session, DEFAULT_PROJECT)
    key: str | None = None
    if await session.scalar(select(ApiKey).where(ApiKey.project_id == project.id).limit(1)) is None:
        _, key = await create_key(session, project.id)
    policy = await session.scalar(select(Policy).where(Policy.project_id == project.id, Policy.name == policy_name))
    if policy is None:
        await create_policy(session, project.id, policy_name, model)
    elif policy.base_model != model:
        raise ValueError(
            f"policy '{policy_name}' learns on {policy.base_model}, not on {model}: "
            "name another ATTUNE_POLICY or another ATTUNE_HOME"
        )
    return key


def resolve_base_model(model: str) -> str:
    """Return the absolute path of a model folder; return a hub name unchanged."""
    return str(Path(model).resolve()) if Path(model).exists() else model


async def create_policy(session: AsyncSession, project_id: str, name: str, model: str) -> Policy:
    """Add and return a policy with version 0, the base model, and deploy that version."""
    policy = Policy(id=new_id("pol"), project_id=project_id, name=name, base_model=resolve_base_model(model))
    session.add(policy)
    await session.flush()
    base = Version(id=new_id("ver"), policy_id=policy.id, number=0, state=VersionState.LIVE, live_at=now())
    session.add(base)
    await session.flush()
    policy.head_version_id = base.id
    session.add(Deployment(policy_id=policy.id, version_id=base.id, changed_at=now()))
    return policy


async def find_project(session: AsyncSession, name: str) -> Project | None:
    return await session.scalar(select(Project).where(Project.name == name))


async def list_projects(session: AsyncSession) -> list[Project]:
    """Return every project, the oldest first."""
    return list(await session.scalars(select(Project).order_by(Project.created_at, Project.id)))


async def _add_project(session: AsyncSession, name: str) -> Project:
    project = Project(id=new_id("proj"), name=name)
    session.add(project)
    await session.flush()
    return project


async def create_project(session: AsyncSession, name: str, policy: str, model: str) -> tuple[Project, str]:
    """Add a project with a policy. Returns the project and its first key, which cannot be read again.

    Raises ValueError for a name that is taken or not allowed.
    """
    for value in (name, policy):
        if not _NAME.fullmatch(value):
            raise ValueError(
                f"'{value}' is not a valid name: use a-z, 0-9, - and _, beginning with a letter or a digit"
            )
    if await find_project(session, name) is not None:
        raise ValueError(f"there is a project '{name}' already")
    project = await _add_project(session, name)
    await create_policy(session, project.id, policy, model)
    row, key = await create_key(session, project.id)
    details = {"name": name, "key": row.id}
    record_audit(session, "operator", AuditAction.PROJECT_CREATED, project.id, project_id=project.id, **details)
    return project, key


async def create_admin_key(session: AsyncSession, name: str) -> str:
    """Return a new key for a project that has lost its own. Raises ValueError when there is no such project."""
    project = await find_project(session, name)
    if project is None:
        raise ValueError(f"there is no project '{name}'")
    _, key = await create_key(session, project.id, actor="operator", name="made by the operator")
    return key


def withholds_consent(metadata: Mapping[str, str]) -> bool:
    """Return whether a request's metadata forbids training on its turns.

    Every value but "true" forbids it: a caller who writes "False" or "0" does not consent.
    """
    return metadata.get(CONSENT, "true") != "true"


async def has_training_consent(session: AsyncSession, turn: Turn) -> bool:
    """Return whether the turn may be trained on now: its key or project may have changed since it was recorded."""
    if turn.exclusion_reason == NO_CONSENT:
        return False
    key = await session.get(ApiKey, turn.key_id) if turn.key_id is not None else None
    if key is not None and key.train is not None:
        return key.train
    return (await session.get_one(Project, turn.project_id)).train


async def set_consent(session: AsyncSession, project_id: str, train: bool, *, actor: str) -> Project:
    """Set whether a project's turns may be trained on."""
    project = await session.get_one(Project, project_id, with_for_update=True, populate_existing=True)
    if project.train != train:
        project.train = train
        action = AuditAction.PROJECT_CONSENT_CHANGED
        record_audit(session, actor, action, project_id, project_id=project_id, train=train)
    return project


async def set_limits(
    session: AsyncSession, project_id: str, limits: ProjectLimits, *, actor: str, at_most: ProjectLimits | None = None
) -> Project:
    """Set those of the project's limits that are given.

    Args:
        at_most: The limits in force, which an admin of the project may lower only; BadRequest otherwise.
    """
    project = await session.get_one(Project, project_id, with_for_update=True, populate_existing=True)
    values = limits.model_dump(exclude_unset=True)
    for name, limit in values.items():
        in_force = getattr(at_most, name) if at_most is not None else None
        if in_force is not None and (limit is None or limit > in_force):
            message = f"limits.{name}: {in_force} is in force; only the operator of the deployment can raise it."
            raise BadRequest(message, param=f"limits.{name}", code="invalid_value")
    changed = {**(project.limits or {}), **values}
    if changed != (project.limits or {}):
        project.limits = changed
        record_audit(session, actor, AuditAction.PROJECT_LIMITS_CHANGED, project_id, project_id=project_id, **values)
    return project


def digest_key(key: str) -> str:
    """Return the SHA-256 of a key, as hex."""
    return hashlib.sha256(key.encode()).hexdigest()


def key_is_active() -> ColumnElement[bool]:
    """Return the condition that an ApiKey is neither revoked nor expired, on the database's clock."""
    return ApiKey.revoked_at.is_(None) & or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > now())


async def create_key(
    session: AsyncSession,
    project_id: str,
    scopes: Sequence[str] = ALL_RIGHTS,
    *,
    actor: str | None = None,
    expires_in: float | None = None,
    **values: Any,
) -> tuple[ApiKey, str]:
    """Add a key. Returns its row and the key itself, which cannot be read again.

    Args:
        actor: Who creates the key, for the audit log; without one there is no entry.
        values: Further columns of ApiKey.
    """
    key = f"sk-attune-{secrets.token_urlsafe(32)}"
    row = ApiKey(
        id=new_id("key"),
        project_id=project_id,
        prefix=key[:16],
        sha256=digest_key(key),
        scopes=list(scopes),
        expires_at=None if expires_in is None else now() + expires_in,
        **values,
    )
    session.add(row)
    await session.flush()
    await session.refresh(row)
    if actor is not None:
        record_audit(session, actor, AuditAction.KEY_CREATED, row.id, project_id=project_id, scopes=row.scopes)
    return row, key


async def get_key(session: AsyncSession, project_id: str, key_id: str, *, param: str = "key_id") -> ApiKey:
    """Return a key of a project, revoked or not. Raises NotFound, which names `param`."""
    row = await session.scalar(select(ApiKey).where(ApiKey.project_id == project_id, ApiKey.id == key_id))
    return require_row(row, f"There is no key '{key_id}'.", param=param)


async def list_keys(session: AsyncSession, project_id: str, after: str | None, limit: int) -> Sequence[ApiKey]:
    """Return up to `limit + 1` keys of a project after this id, revoked ones included, the oldest first."""
    last = None if after is None else await get_key(session, project_id, after, param="after")
    query = select(ApiKey).where(ApiKey.project_id == project_id)
    return (await session.scalars(apply_keyset(query, (ApiKey.created_at, ApiKey.id), last, limit))).all()


async def revoke_key(session: AsyncSession, project_id: str, key_id: str, *, actor: str) -> ApiKey:
    """Revoke a key; a revoked key stays as it is. Raises NotFound, and Conflict for the project's last admin key."""
    # Two admins who revoke each other's key take turns.
    await session.get_one(Project, project_id, with_for_update=True)
    row = await get_key(session, project_id, key_id)
    if row.revoked_at is not None:
        return row
    others = select(ApiKey.scopes).where(ApiKey.project_id == project_id, ApiKey.id != key_id, key_is_active())
    if not any("admin" in scopes for scopes in await session.scalars(others)):
        raise Conflict(
            "This is the project's last admin key; make another before you revoke it.", code="last_admin_key"
        )
    row.revoked_at = now()
    await session.flush()
    await session.refresh(row)
    record_audit(session, actor, AuditAction.KEY_REVOKED, row.id, project_id=project_id)
    return row
