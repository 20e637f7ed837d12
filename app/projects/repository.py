"""Queries on projects and their API keys."""

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.pagination import apply_keyset
from app.models import ApiKey, Project
from app.projects.keys import is_active


async def get_project(session: AsyncSession, project_id: str, *, lock: bool = False) -> Project:
    return await session.get_one(Project, project_id, with_for_update=lock, populate_existing=lock)


async def find_project(session: AsyncSession, name: str) -> Project | None:
    return await session.scalar(select(Project).where(Project.name == name))


async def list_projects(session: AsyncSession) -> list[Project]:
    """Return every project, the oldest first."""
    return list(await session.scalars(select(Project).order_by(Project.created_at, Project.id)))


async def find_key(session: AsyncSession, project_id: str, key_id: str) -> ApiKey | None:
    return await session.scalar(select(ApiKey).where(ApiKey.project_id == project_id, ApiKey.id == key_id))


async def list_keys(session: AsyncSession, project_id: str, after: ApiKey | None, limit: int) -> list[ApiKey]:
    """Return up to `limit + 1` keys of a project, revoked ones included, the oldest first."""
    query = select(ApiKey).where(ApiKey.project_id == project_id)
    last = None if after is None else (after.created_at, after.id)
    return list(await session.scalars(apply_keyset(query, (ApiKey.created_at, ApiKey.id), last, limit)))


async def list_active_keys(session: AsyncSession, project_id: str) -> list[ApiKey]:
    return list(await session.scalars(select(ApiKey).where(ApiKey.project_id == project_id, is_active())))
