"""Projects are made by who runs the machine; a project's keys by its own admins."""

import re

from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import now
from app.core.errors import Conflict, NotFound
from app.models import ApiKey, Project, new_id, record_audit
from app.projects import keys, repository
from app.projects.bootstrap import first_policy
from app.projects.schemas import KeyRequest

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")


async def create_project(session: AsyncSession, name: str, policy: str, model: str) -> tuple[Project, str]:
    """The project and, this one time, its first key. Raises ValueError for a name that is taken or unfit."""
    for word in (name, policy):
        if not _NAME.fullmatch(word):
            raise ValueError(f"'{word}' is no name: use a-z, 0-9, - and _, beginning with a letter or a digit")
    if await repository.project_named(session, name) is not None:
        raise ValueError(f"there is a project '{name}' already")
    project = Project(id=new_id("proj"), name=name)
    session.add(project)
    await session.flush()
    await first_policy(session, project.id, policy, model)
    row, key = await keys.create(session, project.id)
    record_audit(session, "operator", "create_project", project.id, project_id=project.id, name=name, key=row.id)
    return project, key


async def rescue(session: AsyncSession, name: str) -> str:
    """A new admin key for a project that lost its own. Raises ValueError when there is no such project."""
    project = await repository.project_named(session, name)
    if project is None:
        raise ValueError(f"there is no project '{name}'")
    row, key = await keys.create(session, project.id, name="made by the operator")
    record_audit(session, "operator", "create_key", row.id, project_id=project.id, scopes=row.scopes)
    return key


async def create_key(session: AsyncSession, project_id: str, request: KeyRequest, *, actor: str) -> tuple[ApiKey, str]:
    values = request.model_dump(exclude={"scopes", "expires_in"})
    row, key = await keys.create(session, project_id, tuple(request.scopes), expires_in=request.expires_in, **values)
    record_audit(session, actor, "create_key", row.id, project_id=project_id, scopes=row.scopes)
    return row, key


async def key(session: AsyncSession, project_id: str, key_id: str, *, param: str = "key_id") -> ApiKey:
    row = await repository.key(session, project_id, key_id)
    if row is None:
        raise NotFound(f"There is no key '{key_id}'.", param=param)
    return row


async def revoke_key(session: AsyncSession, project_id: str, key_id: str, *, actor: str) -> ApiKey:
    """Idempotent. A project keeps one admin key at least, or nobody could make it another."""
    await repository.project(session, project_id, lock=True)  # two admins who revoke each other take turns
    row = await key(session, project_id, key_id)
    if row.revoked_at is not None:
        return row
    others = [other for other in await repository.live_keys(session, project_id) if other.id != row.id]
    if not any("admin" in other.scopes for other in others):
        raise Conflict(
            "This is the project's last admin key; make another before you revoke it.", code="last_admin_key"
        )
    row.revoked_at = now()
    await session.flush()
    await session.refresh(row)
    record_audit(session, actor, "revoke_key", row.id, project_id=project_id)
    return row


async def set_consent(session: AsyncSession, project_id: str, train: bool, *, actor: str) -> Project:
    project = await repository.project(session, project_id, lock=True)
    if project.train != train:
        project.train = train
        record_audit(session, actor, "set_consent", project_id, project_id=project_id, train=train)
    return project
