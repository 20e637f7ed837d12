"""/v1/status: a project's policies, engines, queues and last events; /livez and /readyz.

/livez checks nothing; /readyz checks the database and that an engine has loaded each serving version.
"""

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from sqlalchemy import ColumnElement, func, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from app.core.database import database_time
from app.core.errors import ERROR_RESPONSES, Unavailable
from app.core.http import settings_of
from app.models import Audit, AuditAction, Batch, Deployment, Engine, Feedback, Origin, Rollout, Sample, Turn, Version
from app.policies import endpoints as policies
from app.policies import repository, service
from app.projects.auth import AdminCaller, DatabaseDep
from app.training.reward_models import summarize

router = APIRouter(responses=ERROR_RESPONSES)
MAX_EVENTS = 10
FREQUENT_ACTIONS = (AuditAction.TOKEN_CREATED, AuditAction.FEEDBACK_WITHDRAWN)  # by applications, for each reply


@router.get("/v1/status", tags=["status"])
async def status(caller: AdminCaller, db: DatabaseDep) -> dict[str, Any]:
    event = select(Audit.created_at, Audit.actor, Audit.action, Audit.subject, Audit.reason)
    is_event = (Audit.project_id == caller.project_id, Audit.action.not_in(FREQUENT_ACTIONS))
    newest = event.where(*is_event).order_by(Audit.seq.desc()).limit(MAX_EVENTS)
    async with db.read() as session:
        rows = await repository.list_policies(session, caller.project_id)
        policy_ids = [policy.id for policy in rows]
        of_sample = Sample.policy_id.in_(policy_ids)
        return {
            "object": "status",
            "policies": [await policies.view_policy(session, policy) for policy in rows],
            "engines": await _engines(session, policy_ids),
            "turns": await _count(session, Turn.state, Turn.policy_id.in_(policy_ids), Turn.origin == Origin.CHAT),
            "rollouts": await _count(session, Rollout.state, Rollout.policy_id.in_(policy_ids)),
            "feedback": await _count(session, Feedback.kind, Feedback.project_id == caller.project_id),
            "samples": await _count(session, Sample.state, of_sample),
            "batches": await _count(session, Batch.state, Batch.policy_id.in_(policy_ids)),
            "reward_models": await summarize(session, rows),
            "not_learned_from": await _count(session, Sample.reason, of_sample, Sample.reason.is_not(None)),
            "events": [dict(row) for row in (await session.execute(newest)).mappings()],
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


@router.get("/livez", tags=["health"])
async def livez() -> dict[str, str]:
    return {"status": "alive"}


@router.get("/readyz", tags=["health"])
async def readyz(request: Request, db: DatabaseDep) -> dict[str, Any]:
    settings = settings_of(request)
    async with db.read() as session:
        engines = await service.list_ready_engines(session)
        serving = await session.scalars(select(Version).join(Deployment, Deployment.version_id == Version.id))
        loaded = all(any(service.is_loaded(engine, version) for engine in engines) for version in serving)
        if not loaded and settings.adaptation == "full":
            loaded = await _is_swapping(session, engines, settings.lease_seconds)
    if not engines or not loaded:
        raise Unavailable("No ready engine holds what serves." if engines else "No engine is ready.")
    return {"status": "ready", "engines": [engine.name for engine in engines]}


async def _is_swapping(session: AsyncSession, engines: Sequence[Engine], seconds: float) -> bool:
    """Return whether requests wait for full weights that an engine is about to serve.

    That is so when the deployment has changed a moment ago, or an engine swaps its weights or verifies them.
    """
    time = await database_time(session)
    changed_at = await session.scalar(select(func.max(Deployment.changed_at)))
    if changed_at is not None and time - changed_at < seconds:
        return True
    swapping = any(engine.swapping_until is not None and engine.swapping_until > time for engine in engines)
    return swapping or any([await service.is_verifying(session, engine) for engine in engines])
