"""The status of a project: its policies, engines, queues and last events; and whether the deployment is ready."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, bindparam, func, select, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from app.core.errors import Unavailable
from app.core.settings import Settings
from app.engines import fleet, load_errors
from app.engines.adaptation import adaptation_of
from app.feedback.unmatched import list_unmatched
from app.models import (
    ANSWERING,
    Audit,
    Batch,
    Deployment,
    Engine,
    Feedback,
    Origin,
    Policy,
    Rollout,
    Sample,
    Turn,
    Version,
)
from app.models.audit import IS_EVENT
from app.policies import repository
from app.policies.views import view_policy
from app.training.reward_models import summarize
from app.training.sample_totals import WAITING_STATES, count_waiting

MAX_EVENTS = 10
MAX_ROWS = 10_000  # the newest ones, which are counted: this bounds the duration, however many there are


async def read_status(session: AsyncSession, project_id: str) -> dict[str, Any]:
    """Return a project's policies, engines, queues and last events."""
    event = select(Audit.created_at, Audit.actor, Audit.action, Audit.subject, Audit.reason)
    is_event = (Audit.project_id == project_id, text(IS_EVENT))
    newest = event.where(*is_event).order_by(Audit.seq.desc()).limit(MAX_EVENTS)
    rows = await repository.list_policies(session, project_id)
    policy_ids = [policy.id for policy in rows]
    is_chat = Turn.origin == bindparam(None, Origin.CHAT.value, literal_execute=True)  # for the partial index
    return {
        "object": "status",
        "policies": [await view_policy(session, policy) for policy in rows],
        "engines": await _engines(session, policy_ids),
        "counted": MAX_ROWS,
        "turns": await _count_by_policy(session, policy_ids, Turn, Turn.state, is_chat),
        "rollouts": await _count_by_policy(session, policy_ids, Rollout, Rollout.state),
        "feedback": await _count(
            session,
            Feedback.kind,
            Feedback.created_at,
            Feedback.project_id == project_id,
            Feedback.emptied_at.is_(None),
        ),
        "unmatched_votes": [
            {name: getattr(row, name) for name in ("connector", "reason", "num_votes", "last_at")}
            for row in await list_unmatched(session, project_id)
        ],
        "samples": await _count_samples(session, policy_ids),
        "batches": await _count_by_policy(session, policy_ids, Batch, Batch.state),
        "reward_models": await summarize(session, rows),
        "not_learned_from": await _count_by_policy(session, policy_ids, Sample, Sample.reason),
        "events": [dict(row) for row in (await session.execute(newest)).mappings()],
    }


async def _count(
    session: AsyncSession,
    column: InstrumentedAttribute[Any],
    created_at: InstrumentedAttribute[float],
    *where: ColumnElement[bool],
) -> dict[str, int]:
    """Count the newest MAX_ROWS rows by the values of a column; null is left out."""
    newest = select(column.label("value")).where(*where).order_by(created_at.desc()).limit(MAX_ROWS).subquery().c
    rows = await session.execute(select(newest.value, func.count()).group_by(newest.value))
    return {str(value): count for value, count in rows if value is not None}


async def _count_by_policy(
    session: AsyncSession,
    policy_ids: Sequence[str],
    table: Any,
    column: InstrumentedAttribute[Any],
    *where: ColumnElement[bool],
) -> dict[str, int]:
    """Count the newest MAX_ROWS rows of each policy by the values of a column."""
    counts: Counter[str] = Counter()
    for policy_id in policy_ids:
        counts.update(await _count(session, column, table.created_at, table.policy_id == policy_id, *where))
    return dict(counts)


async def _count_samples(session: AsyncSession, policy_ids: Sequence[str]) -> dict[str, int]:
    """Count all samples that wait, however old they are, and the others among the newest MAX_ROWS."""
    waiting: Counter[str] = Counter()
    for (_, state), count in (await count_waiting(session, policy_ids)).items():
        waiting[str(state)] += count
    newest = await _count_by_policy(session, policy_ids, Sample, Sample.state)
    return dict(waiting) | {state: count for state, count in newest.items() if state not in WAITING_STATES}


async def _engines(session: AsyncSession, policy_ids: list[str]) -> list[dict[str, object]]:
    """Return all engines, each with those of the caller's versions that it has loaded, or could not load, and why."""
    engines = list(await session.scalars(select(Engine).order_by(Engine.name)))
    named = {name for engine in engines for name in (*engine.loaded, engine.weights, *load_errors.read(engine))}
    is_own = (Version.policy_id.in_(policy_ids), Version.adapter_name.in_(named - {None}))
    own = set(await session.scalars(select(Version.adapter_name).where(*is_own)))
    return [
        {
            "name": engine.name,
            "kind": engine.kind,
            "state": engine.state,
            "loaded": [name for name in (*engine.loaded, engine.weights) if name is not None and name in own],
            "heartbeat_at": engine.heartbeat_at,
            "not_loaded": {name: error for name, error in load_errors.read(engine).items() if name in own},
            "reason": load_errors.describe_down(engine),
        }
        for engine in engines
    ]


async def read_readiness(session: AsyncSession, settings: Settings) -> dict[str, object]:
    """Return which engines are ready. Raises Unavailable if none is, or none has loaded what serves."""
    engines = await fleet.list_ready_engines(session)
    serving = await session.scalars(
        select(Version)
        .join(Deployment, Deployment.version_id == Version.id)
        .join(Policy, Policy.id == Version.policy_id)
        .where(Policy.state.in_(ANSWERING))
    )
    held = {version: any(fleet.is_loaded(engine, version) for engine in engines) for version in serving}
    # A damaged version is the fault of its own files: as long as another one is served, the API takes traffic.
    failed = {name for engine in engines for name in load_errors.read(engine)} if any(held.values()) else set()
    unloadable = [version for version, is_held in held.items() if not is_held and version.adapter in failed]
    loaded = all(is_held for version, is_held in held.items() if version not in unloadable)
    if not loaded:
        loaded = await adaptation_of(settings).is_about_to_serve(session, engines, settings.workers.lease_seconds)
    if not engines or not loaded:
        raise Unavailable("No ready engine holds what serves." if engines else "No engine is ready.")
    body = {"status": "ready", "engines": [engine.name for engine in engines]}
    return body | ({"unloadable_versions": len(unloadable)} if unloadable else {})
