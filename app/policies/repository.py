"""Queries on policies, deployments and versions: their statistics, ancestors and descendants."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import CTE, case, exists, func, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from app.models import (
    ONCE_LIVE,
    Batch,
    BatchTurn,
    Deployment,
    Feedback,
    Origin,
    Policy,
    Reward,
    Turn,
    TurnState,
    Version,
    VersionState,
)
from app.policies.references import version_name

NO_STATS = {"turns": 0, "mean_length": 0.0, "rated": 0, "approval": None, "alignment_delay": None}


async def find_policy(session: AsyncSession, project_id: str, name: str) -> Policy | None:
    return await session.scalar(select(Policy).where(Policy.project_id == project_id, Policy.name == name))


async def list_policies(session: AsyncSession, project_id: str) -> list[Policy]:
    """Return the project's policies, by name."""
    return list(await session.scalars(select(Policy).where(Policy.project_id == project_id).order_by(Policy.name)))


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


async def version_stats(session: AsyncSession, policy_id: str) -> dict[str, dict[str, Any]]:
    """Return statistics by version id: `turns`, `mean_length` (tokens), `rated`, `approval` and `alignment_delay`.

    `rated` counts rewards (one per turn and reward source); `approval` is the share of them that are positive. The
    alignment delay is the time in seconds from the last feedback in the version's batch to its first finished reply.
    """
    stats: dict[str, dict[str, Any]] = defaultdict(NO_STATS.copy)
    first_reply: dict[str, float | None] = {}
    turns = await session.execute(
        select(Turn.version_id, func.count(), func.avg(Turn.num_output_tokens), func.min(Turn.finished_at))
        .where(Turn.policy_id == policy_id, Turn.state == TurnState.DONE, Turn.origin == Origin.CHAT)
        .group_by(Turn.version_id)
    )
    for version_id, count, length, first_reply_at in turns:
        first_reply[version_id] = first_reply_at
        stats[version_id] |= {"turns": count, "mean_length": float(length or 0)}
    rewards = await session.execute(
        select(Turn.version_id, func.count(), func.sum(case((Reward.value > 0, 1), else_=0)))
        .join(Turn, Turn.id == Reward.turn_id)
        .where(Turn.policy_id == policy_id, Turn.origin == Origin.CHAT)
        .group_by(Turn.version_id)
    )
    for version_id, rated, positive in rewards:
        stats[version_id] |= {"rated": rated, "approval": positive / rated}
    last_feedback = await session.execute(
        select(Batch.version_id, func.max(Feedback.created_at))
        .join(BatchTurn, BatchTurn.batch_id == Batch.id)
        .join(Feedback, Feedback.turn_id == BatchTurn.turn_id)
        .where(Batch.policy_id == policy_id, Feedback.created_at <= Batch.created_at)
        .group_by(Batch.version_id)
    )
    for version_id, last_feedback_at in last_feedback:
        replied_at = first_reply.get(version_id or "")
        if version_id is not None and replied_at is not None:
            stats[version_id]["alignment_delay"] = replied_at - last_feedback_at
    return stats


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
    versions = await list_versions(session, policy_id)
    return last_untainted_ancestor(serving, versions, tainted_since(versions))
