"""The reconciler: find work whose message was lost, and resume it. Without any message this still finishes the work."""

import logging
from collections.abc import Awaitable, Callable

from sqlalchemy import ColumnElement, exists, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import LEARNED
from app.chat import episode_limits
from app.core.database import Database, now
from app.core.jobs import TaskName, enqueue_after_commit
from app.core.leases import lease_is_free
from app.core.settings import Settings
from app.datasets import removal
from app.environments import expired_leases
from app.feedback import settled_votes, token_counts
from app.models import (
    LOST_REASON,
    REQUESTED,
    SERVER_LOST,
    Batch,
    BatchState,
    Engine,
    EngineState,
    Episode,
    Feedback,
    Judgement,
    LineMove,
    PlanState,
    RewardModel,
    RewardModelState,
    Rollout,
    RolloutPlan,
    Sample,
    SampleState,
    Turn,
    TurnState,
    Version,
    VersionState,
)
from app.ops import audit_chain, webhook_events, webhooks
from app.training import feedback_density, rollouts, sample_totals
from workers import retention
from workers.feedback.ended_episodes import is_unprocessed
from workers.queue.leased_job import is_due
from workers.release import adapter_sync, publish
from workers.release.delivery.choice import delivery_of
from workers.training import batches, reward_model_fits

log = logging.getLogger("attune.reconcile")


async def reconcile(db: Database, settings: Settings) -> None:
    """Close what was lost, enqueue the tasks that have work, and bring engines and releases up to date.

    A step that fails is logged, and the others still run. Raises ExceptionGroup with the errors of those that failed.
    """
    steps: dict[str, Callable[[Database, Settings], Awaitable[object]]] = {
        "quarantine_poisoned": batches.quarantine_poisoned,
        "close_lost_turns": _close_lost_turns,
        "settle_expired_attempts": expired_leases.settle_attempts,
        "end_expired_episodes": lambda db, _: episode_limits.end_expired(db),
        "mark_silent_engines_down": _mark_silent_engines_down,
        "enqueue_tasks": _enqueue_tasks,
        "check_canaries": publish.check_canaries,
        "check_shadow_deployments": publish.check_shadow_deployments,
        "sync_adapters": adapter_sync.sync_adapters,
        "unload_unused_adapters": adapter_sync.unload_unused_adapters,
        "measure_feedback": feedback_density.measure_feedback,
        "record_token_counts": lambda db, _: token_counts.record_counts(db),
        "seal_audit": lambda db, _: audit_chain.seal_entries(db),
        "encrypt_secrets": webhooks.encrypt_secrets,
        "create_webhook_deliveries": lambda db, _: webhook_events.create_deliveries(db),
        "count_votes": settled_votes.count_settled_votes,
        "count_rollouts": lambda db, _: rollouts.count_settled_rollouts(db),
        "count_samples": lambda db, _: sample_totals.count_miscounted(db),
        "remove_expired": retention.remove_expired,
        "remove_hidden_datasets": lambda db, _: removal.remove_hidden(db),
        "reward_model_fits": reward_model_fits.reconcile,  # last, since it reads much feedback and may take long
    }
    errors: dict[str, Exception] = {}
    for name, step in steps.items():
        try:
            await step(db, settings)
        except Exception as error:
            log.exception("the step %s failed", name)
            errors[name] = error
    if errors:
        raise ExceptionGroup(f"steps of the reconciler failed: {', '.join(errors)}", list(errors.values()))


async def _enqueue_tasks(db: Database, settings: Settings) -> None:
    async with db.read() as session:
        tasks = await _tasks_with_work(session, settings)
        if await delivery_of(settings).has_outdated_engine(session):
            tasks.append("evaluate")
    if tasks:
        async with db.write() as session:
            enqueue_after_commit(session, *tasks)


async def _tasks_with_work(session: AsyncSession, settings: Settings) -> list[TaskName]:
    """Return the tasks that have work, whether or not their message was lost."""
    due_judgement = exists().where(is_due(Judgement))
    work: dict[TaskName, ColumnElement[bool]] = {
        "curate": or_(
            exists().where(~Feedback.processed),
            exists().where(~Turn.processed, Turn.state != TurnState.OPEN),
            exists(select(Episode.id).where(is_unprocessed())),
        ),
        "judge": due_judgement.where(Judgement.source != LEARNED),
        "rollout": or_(exists().where(is_due(Rollout)), exists().where(RolloutPlan.state == PlanState.RUNNING)),
        "assemble": or_(
            exists().where(Sample.state == SampleState.OPEN, Sample.ready_at <= now()), exists(select(LineMove.id))
        ),
        "train": or_(
            exists().where(Batch.state == BatchState.OPEN, lease_is_free(Batch)),
            exists().where(RewardModel.state == RewardModelState.OPEN, lease_is_free(RewardModel)),
            due_judgement.where(Judgement.source == LEARNED),
        ),
        "evaluate": exists().where(Version.state == VersionState.TRAINED, lease_is_free(Version)),
        "publish": exists().where(Version.state.in_(publish.PUBLISHABLE_STATES), lease_is_free(Version)),
        "webhook": webhook_events.has_due_delivery(),
    }
    row = (await session.execute(select(*[condition.label(name) for name, condition in work.items()]))).one()
    return [task for task, has_work in zip(work, row, strict=True) if has_work]


async def _close_lost_turns(db: Database, settings: Settings) -> None:
    """Abort turns whose process died during the reply. Nothing else finishes them, and feedback on them waits."""
    async with db.write() as session:
        await session.execute(
            update(Turn)
            .where(
                Turn.state == TurnState.OPEN,
                Turn.origin.in_(REQUESTED),
                Turn.created_at < now() - 1.5 * settings.server.chat_timeout_seconds,
            )
            .values(
                state=TurnState.ABORTED,
                finish_reason=SERVER_LOST,
                exclusion_reason=func.coalesce(Turn.exclusion_reason, LOST_REASON),
                finished_at=now(),
            )
        )


async def _mark_silent_engines_down(db: Database, settings: Settings) -> None:
    async with db.write() as session:
        await session.execute(
            update(Engine)
            .where(
                Engine.state == EngineState.READY,
                Engine.heartbeat_at < now() - 3 * settings.workers.lease_seconds,
                # An engine cannot answer while its weights are swapped.
                or_(Engine.swapping_until.is_(None), Engine.swapping_until < now()),
            )
            .values(state=EngineState.DOWN, reason="no heartbeat of its supervisor")
        )
