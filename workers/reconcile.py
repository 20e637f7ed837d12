"""Whatever was left lying → picked up again. Lose every message and this still finishes the work."""

import asyncio
import logging

from sqlalchemy import ColumnElement, exists, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import LEARNED
from app.core.database import Database, now
from app.core.jobs import TaskName, enqueue_after_commit
from app.core.leases import lease_is_free
from app.core.settings import Settings
from app.inference.client import EngineClient
from app.inference.errors import EngineRefused, EngineUnavailable
from app.inference.keys import engine_keys
from app.inference.pool import EnginePool
from app.models import (
    LOST_REASON,
    SERVER_LOST,
    Batch,
    BatchState,
    Engine,
    EngineState,
    Feedback,
    Judgement,
    JudgementState,
    Origin,
    PlanState,
    RewardModel,
    RewardModelState,
    Rollout,
    RolloutPlan,
    RolloutState,
    Sample,
    SampleState,
    Turn,
    TurnState,
    Version,
    VersionState,
)
from app.policies import service
from workers.release import adapter_sync, canary, engine_inventory, publish, shadow, weight_swap
from workers.training import batches, reward_models

log = logging.getLogger("attune.reconcile")
LAST_CALL_FACTOR = 5  # of the time a route may be old: whoever was sent to a version just before is there by then


async def reconcile(db: Database, settings: Settings) -> None:
    await batches.quarantine_poisoned(db, settings)
    async with db.write() as session:
        await _close_lost_turns(session, settings)
        await _mark_silent_engines(session, settings)
        enqueue_after_commit(session, *await _waiting(session, settings))
        if settings.adaptation == "full" and await weight_swap.lagging(session):
            enqueue_after_commit(session, "evaluate")
    await canary.watch(db, settings)
    await shadow.watch(db, settings)
    await adapter_sync.sync_adapters(db, settings)
    await retire(db, settings)
    await reward_models.reconcile(db, settings)  # the last: it looks through what people have said, and may take long


async def _waiting(session: AsyncSession, settings: Settings) -> list[TaskName]:
    """The stations that have work and might not have heard of it."""
    due = exists().where(Judgement.state == JudgementState.OPEN, Judgement.due_at <= now(), lease_is_free(Judgement))
    work: dict[TaskName, ColumnElement[bool]] = {
        "curate": or_(
            exists().where(~Feedback.processed),
            exists().where(~Turn.processed, Turn.state != TurnState.OPEN),
        ),
        "judge": due.where(Judgement.source != LEARNED),
        "rollout": or_(
            exists().where(Rollout.state == RolloutState.OPEN, Rollout.due_at <= now(), lease_is_free(Rollout)),
            exists().where(RolloutPlan.state == PlanState.RUNNING),
        ),
        "assemble": exists().where(Sample.state == SampleState.OPEN, Sample.ready_at <= now()),
        "train": or_(
            exists().where(Batch.state == BatchState.OPEN, lease_is_free(Batch)),
            exists().where(RewardModel.state == RewardModelState.OPEN, lease_is_free(RewardModel)),
            due.where(Judgement.source == LEARNED),
        ),
        "evaluate": exists().where(Version.state == VersionState.TRAINED, lease_is_free(Version)),
        "publish": exists().where(Version.state.in_(publish.WAITS), lease_is_free(Version)),
    }
    found = (await session.execute(select(*[condition.label(name) for name, condition in work.items()]))).one()
    return [station for station, waits in zip(work, found, strict=True) if waits]


async def _close_lost_turns(session: AsyncSession, settings: Settings) -> None:
    """Turns whose process died mid-reply: nobody will ever finish them, and feedback on them waits."""
    await session.execute(
        update(Turn)
        .where(
            Turn.state == TurnState.OPEN,
            Turn.origin == Origin.CHAT,
            Turn.created_at < now() - 1.5 * settings.chat_timeout_seconds,
        )
        .values(
            state=TurnState.ABORTED,
            finish_reason=SERVER_LOST,
            exclusion_reason=func.coalesce(Turn.exclusion_reason, LOST_REASON),
            finished_at=now(),
        )
        .execution_options(synchronize_session=False)
    )


async def _mark_silent_engines(session: AsyncSession, settings: Settings) -> None:
    await session.execute(
        update(Engine)
        .where(
            Engine.state == EngineState.READY,
            Engine.heartbeat_at < now() - 3 * settings.lease_seconds,
            or_(
                Engine.swapping_until.is_(None), Engine.swapping_until < now()
            ),  # it is silent while weights are loaded
        )
        .values(state=EngineState.DOWN, reason="its supervisor fell silent")
        .execution_options(synchronize_session=False)
    )


async def retire(db: Database, settings: Settings) -> None:
    """Unload, one at a time and off the publish path, what nobody may ask for any more."""
    asked = exists().where(Rollout.id == Turn.id, Rollout.lease_until > now())  # one that only waits must not hold it
    async with db.read() as session:
        busy = set(
            await session.scalars(
                select(Version.adapter_name)
                .join(Turn, Turn.version_id == Version.id)
                .where(Turn.state == TurnState.OPEN, or_(Turn.origin == Origin.CHAT, asked))
            )
        )
        kept = busy | {
            version.adapter_name for version in await engine_inventory.wanted(session, settings.keep_versions)
        }
        engines = await service.ready_engines(session)
    pool = EnginePool(engine_keys(settings))
    try:
        for engine in engines:
            client = pool.at(engine.url)
            for name in sorted((set(engine.loaded) | await _unnoted(db, client, engine)) - kept):
                await _retire(db, settings, client, engine, name)
    finally:
        await pool.close()


async def _unnoted(db: Database, client: EngineClient, engine: Engine) -> set[str]:
    """Versions that it holds though the ledger does not know: their load came to an end after it was given up."""
    try:
        there = await client.adapters() - set(engine.loaded)
    except (EngineUnavailable, EngineRefused):
        return set()
    if not there:
        return set()
    async with db.read() as session:
        ours = await session.scalars(select(Version.adapter_name).where(Version.adapter_name.in_(there)))
        return {name for name in ours if name is not None}


async def _retire(db: Database, settings: Settings, client: EngineClient, engine: Engine, name: str) -> None:
    """First nobody is routed there, in the transaction that finds it unwanted; then it goes."""
    async with db.write() as session:
        if (
            await engine_inventory.locked(session, engine) is None
        ):  # before we look, so that nobody points to it meanwhile
            return
        if name in {version.adapter_name for version in await engine_inventory.wanted(session, settings.keep_versions)}:
            return
        await engine_inventory.note(session, engine, removed=name)
    await asyncio.sleep(LAST_CALL_FACTOR * settings.route_cache_seconds)
    try:
        await client.unload_adapter(name)
    except (EngineUnavailable, EngineRefused) as error:
        log.warning("%s could not be unloaded from %s, the next sweep tries again: %s", name, engine.name, error)
