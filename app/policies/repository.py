"""Queries on policies, deployments and versions: their ancestors and descendants."""

from collections.abc import Collection, Mapping, Sequence

from sqlalchemy import CTE, exists, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from app.models import ANSWERING, ONCE_LIVE, Deployment, Policy, PolicyState, Version, VersionState
from app.policies.references import version_name


async def find_policy(session: AsyncSession, project_id: str, name: str) -> Policy | None:
    return await session.scalar(select(Policy).where(Policy.project_id == project_id, Policy.name == name))


async def list_policies(
    session: AsyncSession, project_id: str, states: Collection[PolicyState] = ANSWERING
) -> list[Policy]:
    """Return the project's policies in these states, by name; by default those that answer chats."""
    conditions = (Policy.project_id == project_id, Policy.state.in_(states))
    return list(await session.scalars(select(Policy).where(*conditions).order_by(Policy.name)))


async def get_deployment(session: AsyncSession, policy_id: str) -> Deployment:
    return await session.get_one(Deployment, policy_id)


async def get_version(session: AsyncSession, version_id: str) -> Version:
    return await session.get_one(Version, version_id)


async def find_version_name(session: AsyncSession, policy: Policy, version_id: str | None) -> str | None:
    """Return the version's name, such as "assistant@v12"; None without an id."""
    return version_name(policy, await get_version(session, version_id)) if version_id else None


async def find_version(session: AsyncSession, policy_id: str, number: int) -> Version | None:
    return await session.scalar(select(Version).where(Version.policy_id == policy_id, Version.number == number))


async def find_shadow_version(session: AsyncSession, policy_id: str) -> Version | None:
    """Return the version in shadow; of several the newest."""
    query = select(Version).where(Version.policy_id == policy_id, Version.state == VersionState.SHADOW)
    return await session.scalar(query.order_by(Version.number.desc()).limit(1))


async def list_versions(session: AsyncSession, policy_id: str) -> list[Version]:
    """Return all versions of a policy, by number."""
    return list(await session.scalars(select(Version).where(Version.policy_id == policy_id).order_by(Version.number)))


async def list_newest_versions(
    session: AsyncSession, policy_id: str, limit: int, before: int | None = None
) -> list[Version]:
    """Return up to `limit + 1` versions, the newest first; with `before` those with lower numbers."""
    query = select(Version).where(Version.policy_id == policy_id)
    if before is not None:
        query = query.where(Version.number < before)
    return list(await session.scalars(query.order_by(Version.number.desc()).limit(limit + 1)))


async def list_ancestors(session: AsyncSession, version_id: str, steps: int) -> list[Version]:
    """Return the version and at most `steps` of its ancestors, the nearest first."""
    line = [await get_version(session, version_id)]
    while len(line) <= steps and line[-1].parent_id is not None:
        line.append(await get_version(session, line[-1].parent_id))
    return line


async def descends_from(session: AsyncSession, version_id: str | None, ancestor: Version) -> bool:
    """Whether the version is `ancestor`, or was trained from it over any number of updates."""
    version = await session.get(Version, version_id) if version_id else None
    while version is not None and version.id != ancestor.id and version.number > ancestor.number and version.parent_id:
        version = await session.get(Version, version.parent_id)
    return version is not None and version.id == ancestor.id


def select_descendants(ids: Collection[str], limit: int | None = None) -> CTE:
    """Return a query for the ids of these versions and of all their descendants; with `limit` of about so many.

    PostgreSQL stops a recursion that is limited, so that a long line of versions is not read to its end.
    """
    line = select(Version.id).where(Version.id.in_(ids)).cte("descendants", recursive=True)
    child = aliased(Version)
    descendants = line.union(select(child.id).join(line, child.parent_id == line.c.id))
    return descendants if limit is None else select(descendants.c.id).limit(limit).cte("nearest")


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


async def has_tainted_versions(session: AsyncSession, policy_id: str) -> bool:
    """Return whether a version of the policy has learned from data that is erased."""
    return bool(
        await session.scalar(select(exists().where(Version.policy_id == policy_id, Version.tainted_at.is_not(None))))
    )


async def find_numbers(session: AsyncSession, ids: Collection[str | None]) -> dict[str, int]:
    """Return the numbers of versions by id."""
    rows = await session.execute(select(Version.id, Version.number).where(Version.id.in_(ids)))
    return {id: number for id, number in rows}


async def find_untainted_ancestor(session: AsyncSession, policy_id: str, serving: Version) -> Version | None:
    """Return the version to roll back to where `serving` has learned from erased data, else None."""
    if not await has_tainted_versions(session, policy_id):
        return None
    versions = await list_versions(session, policy_id)
    return last_untainted_ancestor(serving, versions, tainted_since(versions))
