"""/v1/status: a project's policies, engines, queues and last events."""

from typing import Any

from fastapi import APIRouter
from sqlalchemy import ColumnElement, func, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from app.core.errors import ERROR_RESPONSES
from app.models import Audit, Batch, Engine, Feedback, Origin, Rollout, Sample, Turn, Version
from app.policies import endpoints as policies
from app.policies import repository
from app.projects.auth import AdminCaller, DatabaseDep
from app.training.reward_models.repository import summarize

router = APIRouter(prefix="/v1", tags=["status"], responses=ERROR_RESPONSES)
MAX_EVENTS = 10


@router.get("/status")
async def status(caller: AdminCaller, db: DatabaseDep) -> dict[str, Any]:
    async with db.read() as session:
        rows = await repository.list_policies(session, caller.project_id)
        policy_ids = [policy.id for policy in rows]
        return {
            "object": "status",
            "policies": [await policies.view_policy(session, policy) for policy in rows],
            "engines": await _engines(session, policy_ids),
            "turns": await _count(session, Turn.state, Turn.policy_id.in_(policy_ids), Turn.origin == Origin.CHAT),
            "rollouts": await _count(session, Rollout.state, Rollout.policy_id.in_(policy_ids)),
            "feedback": await _count(session, Feedback.kind, Feedback.project_id == caller.project_id),
            "samples": await _count(session, Sample.state, Sample.policy_id.in_(policy_ids)),
            "batches": await _count(session, Batch.state, Batch.policy_id.in_(policy_ids)),
            "reward_models": await summarize(session, rows),
            "not_learned_from": await _count(
                session, Sample.reason, Sample.policy_id.in_(policy_ids), Sample.reason.is_not(None)
            ),
            "events": [_event(row) for row in await _audit(session, caller.project_id)],
        }


async def _count(
    session: AsyncSession, column: InstrumentedAttribute[Any], *where: ColumnElement[bool]
) -> dict[str, int]:
    rows = await session.execute(select(column, func.count()).where(*where).group_by(column))
    return {str(value): count for value, count in rows}


async def _engines(session: AsyncSession, policy_ids: list[str]) -> list[dict[str, Any]]:
    """Return all engines, each with those of the caller's versions that it has loaded."""
    own = set(await session.scalars(select(Version.adapter_name).where(Version.policy_id.in_(policy_ids))))
    return [
        {
            "name": engine.name,
            "state": engine.state,
            "loaded": [name for name in (*engine.loaded, engine.weights) if name is not None and name in own],
            "heartbeat_at": engine.heartbeat_at,
            "reason": engine.reason,
        }
        for engine in await session.scalars(select(Engine).order_by(Engine.name))
    ]


async def _audit(session: AsyncSession, project_id: str) -> list[Audit]:
    rows = select(Audit).where(Audit.project_id == project_id).order_by(Audit.seq.desc()).limit(MAX_EVENTS)
    return list(await session.scalars(rows))


def _event(row: Audit) -> dict[str, Any]:
    return {
        "created_at": row.created_at,
        "actor": row.actor,
        "action": row.action,
        "subject": row.subject,
        "reason": row.reason,
    }
