"""Queries on projects and their keys."""

from sqlalchemy import select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from app.models import ApiKey, Project
from app.projects.keys import alive


async def project(session: AsyncSession, project_id: str, *, lock: bool = False) -> Project:
    return await session.get_one(Project, project_id, with_for_update=lock, populate_existing=lock)


async def project_named(session: AsyncSession, name: str) -> Project | None:
    return await session.scalar(select(Project).where(Project.name == name))


async def projects(session: AsyncSession) -> list[Project]:
    return list(await session.scalars(select(Project).order_by(Project.created_at, Project.id)))


async def key(session: AsyncSession, project_id: str, key_id: str) -> ApiKey | None:
    return await session.scalar(select(ApiKey).where(ApiKey.project_id == project_id, ApiKey.id == key_id))


async def keys_of(session: AsyncSession, project_id: str, after: ApiKey | None, limit: int) -> list[ApiKey]:
    """Oldest first."""
    asked = select(ApiKey).where(ApiKey.project_id == project_id)
    if after is not None:
        asked = asked.where(tuple_(ApiKey.created_at, ApiKey.id) > tuple_(after.created_at, after.id))
    return list(await session.scalars(asked.order_by(ApiKey.created_at, ApiKey.id).limit(limit)))


async def live_keys(session: AsyncSession, project_id: str) -> list[ApiKey]:
    return list(await session.scalars(select(ApiKey).where(ApiKey.project_id == project_id, alive())))
