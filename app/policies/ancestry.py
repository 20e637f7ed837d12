"""The family tree of a policy's versions: ancestors, descendants, and which versions learned from erased data."""

from collections.abc import Collection, Mapping, Sequence

from sqlalchemy import CTE, exists, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from app.models import ONCE_LIVE, Version
from app.policies import repository


async def list_ancestors(session: AsyncSession, version_id: str, steps: int) -> list[Version]:
    """Return the version and at most `steps` of its ancestors, the nearest first."""
    line = [await repository.get_version(session, version_id)]
    while len(line) <= steps and line[-1].parent_id is not None:
        line.append(await repository.get_version(session, line[-1].parent_id))
    return line


async def descends_from(session: AsyncSession, version_id: str | None, ancestor: Version) -> bool:
    """Whether the version is `ancestor`, or was trained from it over any number of updates."""
    version = await session.get(Version, version_id) if version_id else None
    while version is not None and version.id != ancestor.id and version.number > ancestor.number and version.parent_id:
        version = await session.get(Version, version.parent_id)
    return version is not None and version.id == ancestor.id


def select_descendants(ids: Collection[str]) -> CTE:
    """Return a query for the ids of these versions and of all their descendants."""
    line = select(Version.id).where(Version.id.in_(ids)).cte("descendants", recursive=True)
    child = aliased(Version)
    return line.union(select(child.id).join(line, child.parent_id == line.c.id))


def tainted_since(versions: Sequence[Version]) -> dict[str, float]:
    """Return when data that a version learned from was erased, by version id; untainted versions are left out.

    A version that was trained after the erasure inherits the time from its parent.

    Args:
        versions: All versions of one policy, by number.
    """
    since: dict[str, float] = {}
    for version in versions:
        tainted_at = version.tainted_at if version.tainted_at is not None else since.get(version.parent_id or "")
        if tainted_at is not None:
            since[version.id] = tainted_at
    return since


def last_untainted_ancestor(
    version: Version, versions: Sequence[Version], tainted: Mapping[str, float]
) -> Version | None:
    """Return the nearest untainted ancestor that was live; None if there is none, or if `version` is untainted."""
    if version.id not in tainted:
        return None
    by_id = {row.id: row for row in versions}
    ancestor: Version | None = version
    while ancestor is not None and (ancestor.id in tainted or ancestor.state not in ONCE_LIVE):
        ancestor = by_id.get(ancestor.parent_id or "")
    return ancestor


async def find_untainted_ancestor(session: AsyncSession, policy_id: str, serving: Version) -> Version | None:
    """Return the version to roll back to where `serving` has learned from erased data, else None."""
    any_tainted = exists().where(Version.policy_id == policy_id, Version.tainted_at.is_not(None))
    if not await session.scalar(select(any_tainted)):
        return None
    versions = await repository.list_versions(session, policy_id)
    return last_untainted_ancestor(serving, versions, tainted_since(versions))
