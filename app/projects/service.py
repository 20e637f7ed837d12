"""Projects are created by the operator of the machine; a project's keys are created by its own admins."""

import re

from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import now
from app.core.errors import Conflict, NotFound
from app.models import ApiKey, AuditAction, Project, new_id, record_audit
from app.projects import keys, repository
from app.projects.bootstrap import create_policy
from app.projects.schemas import KeyRequest

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")


async def create_project(session: AsyncSession, name: str, policy: str, model: str) -> tuple[Project, str]:
    """Add a project with a policy. Returns the project and its first key, which cannot be read again.

    Raises ValueError for a name that is taken or not allowed.
    """
    for value in (name, policy):
        if not _NAME.fullmatch(value):
            raise ValueError(
                f"'{value}' is not a valid name: use a-z, 0-9, - and _, beginning with a letter or a digit"
            )
    if await repository.find_project(session, name) is not None:
        raise ValueError(f"there is a project '{name}' already")
    project = Project(id=new_id("proj"), name=name)
    session.add(project)
    await session.flush()
    await create_policy(session, project.id, policy, model)
    row, key = await keys.create(session, project.id)
    details = {"name": name, "key": row.id}
    record_audit(session, "operator", AuditAction.PROJECT_CREATED, project.id, project_id=project.id, **details)
    return project, key


async def create_admin_key(session: AsyncSession, name: str) -> str:
    """Return a new key for a project that has lost its own. Raises ValueError when there is no such project."""
    project = await repository.find_project(session, name)
    if project is None:
        raise ValueError(f"there is no project '{name}'")
    row, key = await keys.create(session, project.id, name="made by the operator")
    record_audit(session, "operator", AuditAction.KEY_CREATED, row.id, project_id=project.id, scopes=row.scopes)
    return key


async def create_key(session: AsyncSession, project_id: str, request: KeyRequest, *, actor: str) -> tuple[ApiKey, str]:
    """Add a key to a project. Returns its row and the key itself, which cannot be read again."""
    values = request.model_dump(exclude={"scopes", "expires_in"})
    row, key = await keys.create(session, project_id, tuple(request.scopes), expires_in=request.expires_in, **values)
    record_audit(session, actor, AuditAction.KEY_CREATED, row.id, project_id=project_id, scopes=row.scopes)
    return row, key


async def get_key(session: AsyncSession, project_id: str, key_id: str, *, param: str = "key_id") -> ApiKey:
    """Return a key of a project, revoked or not. Raises NotFound, which names `param`."""
    row = await repository.find_key(session, project_id, key_id)
    if row is None:
        raise NotFound(f"There is no key '{key_id}'.", param=param)
    return row


async def revoke_key(session: AsyncSession, project_id: str, key_id: str, *, actor: str) -> ApiKey:
    """Revoke a key; a revoked key stays as it is. Raises NotFound, and Conflict for the project's last admin key."""
    await repository.get_project(session, project_id, lock=True)  # two admins who revoke each other's key take turns
    row = await get_key(session, project_id, key_id)
    if row.revoked_at is not None:
        return row
    others = [other for other in await repository.list_active_keys(session, project_id) if other.id != row.id]
    if not any("admin" in other.scopes for other in others):
        raise Conflict(
            "This is the project's last admin key; make another before you revoke it.", code="last_admin_key"
        )
    row.revoked_at = now()
    await session.flush()
    await session.refresh(row)
    record_audit(session, actor, AuditAction.KEY_REVOKED, row.id, project_id=project_id)
    return row


async def set_consent(session: AsyncSession, project_id: str, train: bool, *, actor: str) -> Project:
    """Set whether a project's turns may be trained on."""
    project = await repository.get_project(session, project_id, lock=True)
    if project.train != train:
        project.train = train
        record_audit(
            session, actor, AuditAction.PROJECT_CONSENT_CHANGED, project_id, project_id=project_id, train=train
        )
    return project
