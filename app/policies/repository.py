"""Queries on policies, versions and deployments."""

from typing import Any

from sqlalchemy import case, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.models import Batch, Deployment, Feedback, Origin, Policy, Reward, Sample, Turn, TurnState, Version


async def policy_named(session: AsyncSession, project_id: str, name: str) -> Policy | None:
    return await session.scalar(select(Policy).where(Policy.project_id == project_id, Policy.name == name))


async def policies_of(session: AsyncSession, project_id: str) -> list[Policy]:
    return list(await session.scalars(select(Policy).where(Policy.project_id == project_id).order_by(Policy.name)))


async def deployment_of(session: AsyncSession, policy_id: str) -> Deployment:
    deployment = await session.get(Deployment, policy_id)
    assert deployment is not None, f"policy {policy_id} has no deployment"
    return deployment


async def version(session: AsyncSession, version_id: str) -> Version:
    row = await session.get(Version, version_id)
    assert row is not None, f"version {version_id} does not exist"
    return row


async def version_numbered(session: AsyncSession, policy_id: str, number: int) -> Version | None:
    return await session.scalar(select(Version).where(Version.policy_id == policy_id, Version.number == number))


async def versions_of(session: AsyncSession, policy_id: str) -> list[Version]:
    return list(await session.scalars(select(Version).where(Version.policy_id == policy_id).order_by(Version.number)))


async def ancestry(session: AsyncSession, version_id: str, steps: int) -> list[Version]:
    """The version and at most `steps` of its forebears, nearest first: the freshest that samples may come from."""
    line = [await version(session, version_id)]
    while len(line) <= steps and line[-1].parent_id is not None:
        line.append(await version(session, line[-1].parent_id))
    return line


async def version_stats(session: AsyncSession, policy_id: str) -> dict[str, dict[str, Any]]:
    """Per version: turns, mean length, and how many rewards there are and are good (one a turn and source)."""
    turns = await session.execute(
        select(Turn.version_id, func.count(), func.avg(Turn.num_output_tokens))
        .where(Turn.policy_id == policy_id, Turn.state == TurnState.DONE, Turn.origin == Origin.CHAT)
        .group_by(Turn.version_id)
    )
    summary = {
        version_id: {"turns": count, "mean_length": float(length or 0), "rated": 0, "approval": None}
        for version_id, count, length in turns
    }
    rewards = await session.execute(
        select(Turn.version_id, func.count(), func.sum(case((Reward.value > 0, 1), else_=0)))
        .join(Turn, Turn.id == Reward.turn_id)
        .where(Turn.policy_id == policy_id, Turn.origin == Origin.CHAT)
        .group_by(Turn.version_id)
    )
    for version_id, rated, good in rewards:
        row = summary.setdefault(version_id, {"turns": 0, "mean_length": 0.0})
        row |= {"rated": rated, "approval": good / rated}
    return summary


async def delays(session: AsyncSession, policy_id: str) -> dict[str, float]:
    """Per version, in seconds: from the last feedback its batch was frozen with to the first reply it gave."""
    heard = await session.execute(
        select(Batch.version_id, func.max(Feedback.created_at))
        .join(Sample, Sample.batch_id == Batch.id)
        .join(Feedback, Feedback.turn_id == Sample.turn_id)
        .where(Batch.policy_id == policy_id, Feedback.created_at <= Batch.created_at)
        .group_by(Batch.version_id)
    )
    replied = await session.execute(
        select(Turn.version_id, func.min(Turn.finished_at))
        .where(Turn.policy_id == policy_id, Turn.state == TurnState.DONE, Turn.origin == Origin.CHAT)
        .group_by(Turn.version_id)
    )
    first = {version_id: finished_at for version_id, finished_at in replied if finished_at is not None}
    return {version_id: first[version_id] - last for version_id, last in heard if version_id in first}
