"""Queries on policies, versions and deployments."""

from typing import Any

from sqlalchemy import case, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.models import (
    Batch,
    Deployment,
    Feedback,
    Origin,
    Policy,
    Reward,
    Sample,
    Turn,
    TurnState,
    Version,
    VersionState,
)


async def find_policy(session: AsyncSession, project_id: str, name: str) -> Policy | None:
    return await session.scalar(select(Policy).where(Policy.project_id == project_id, Policy.name == name))


async def list_policies(session: AsyncSession, project_id: str) -> list[Policy]:
    """Return the project's policies, by name."""
    return list(await session.scalars(select(Policy).where(Policy.project_id == project_id).order_by(Policy.name)))


async def get_deployment(session: AsyncSession, policy_id: str) -> Deployment:
    deployment = await session.get(Deployment, policy_id)
    assert deployment is not None, f"policy {policy_id} has no deployment"
    return deployment


async def get_version(session: AsyncSession, version_id: str) -> Version:
    version = await session.get(Version, version_id)
    assert version is not None, f"version {version_id} does not exist"
    return version


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
    """Return statistics by version id: `turns`, `mean_length` (tokens), `rated` and `approval`.

    `rated` counts rewards (one per turn and reward source); `approval` is the share of them that are positive.
    """
    turns = await session.execute(
        select(Turn.version_id, func.count(), func.avg(Turn.num_output_tokens))
        .where(Turn.policy_id == policy_id, Turn.state == TurnState.DONE, Turn.origin == Origin.CHAT)
        .group_by(Turn.version_id)
    )
    stats = {
        version_id: {"turns": count, "mean_length": float(length or 0), "rated": 0, "approval": None}
        for version_id, count, length in turns
    }
    rewards = await session.execute(
        select(Turn.version_id, func.count(), func.sum(case((Reward.value > 0, 1), else_=0)))
        .join(Turn, Turn.id == Reward.turn_id)
        .where(Turn.policy_id == policy_id, Turn.origin == Origin.CHAT)
        .group_by(Turn.version_id)
    )
    for version_id, rated, positive in rewards:
        row = stats.setdefault(version_id, {"turns": 0, "mean_length": 0.0})
        row |= {"rated": rated, "approval": positive / rated}
    return stats


async def alignment_delays(session: AsyncSession, policy_id: str) -> dict[str, float]:
    """Return the alignment delay in seconds by version id.

    It is the time from the last feedback that was in the version's batch to the version's first finished reply.
    """
    last_feedback = await session.execute(
        select(Batch.version_id, func.max(Feedback.created_at))
        .join(Sample, Sample.batch_id == Batch.id)
        .join(Feedback, Feedback.turn_id == Sample.turn_id)
        .where(Batch.policy_id == policy_id, Feedback.created_at <= Batch.created_at)
        .group_by(Batch.version_id)
    )
    first_replies = await session.execute(
        select(Turn.version_id, func.min(Turn.finished_at))
        .where(Turn.policy_id == policy_id, Turn.state == TurnState.DONE, Turn.origin == Origin.CHAT)
        .group_by(Turn.version_id)
    )
    first = {version_id: finished_at for version_id, finished_at in first_replies if finished_at is not None}
    return {version_id: first[version_id] - last for version_id, last in last_feedback if version_id in first}
