"""Swap the full weights of an engine: drain it, load the version's weights, verify them, or restore the old ones.

An engine holds the weights of one version at a time. Verifying a version therefore takes an engine away from the
serving version, so engines are swapped in turn, and no more of them than the version needs to go live.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from sqlalchemy import ColumnElement, and_, exists, or_, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.errors import DamagedAdapter
from app.core.database import Database, now
from app.core.settings import Settings
from app.engines import fleet, inventory
from app.inference.engine import BASE_WEIGHTS, EngineClient
from app.inference.keys import load_engine_keys
from app.inference.pool import EnginePool
from app.inference.transport import EngineRefused, EngineUnavailable
from app.models import REQUESTED, Engine, Rollout, Turn, TurnState, Version
from workers.base_model import model_dir
from workers.release.verify_delivery import (
    EngineUnreachable,
    NotDelivered,
    Scores,
    Timings,
    VerificationResult,
    check_files,
    require_delivered,
    require_equal_scores,
    require_reachable,
)

log = logging.getLogger("attune.weights")
POLL_SECONDS = 0.02
SWAP_ERRORS = (EngineUnavailable, EngineRefused, NotDelivered)


class EngineBusy(EngineUnavailable):
    """Another process swaps the engine's weights, or the engine was restarted."""


async def verify_on_engines_in_turn(
    db: Database, settings: Settings, pool: EnginePool, engines: Sequence[Engine], version: Version, timings: Timings
) -> VerificationResult:
    """Swap and verify the version, whose files have been checked, until enough of the ready engines hold it.

    The other engines keep the serving version.
    """
    result = VerificationResult()
    for engine in sorted(engines, key=lambda engine: not fleet.is_loaded(engine, version)):
        if fleet.has_quorum(result.verified_engines, engines):
            break
        try:
            await swap_weights(db, settings, pool.get(engine), engine, version, timings)
        except SWAP_ERRORS as error:
            log.warning("%s is not on %s: %s", version.adapter_name, engine.name, error)
            result.errors.append(error)
            result.num_unreachable += isinstance(error, EngineUnreachable | EngineBusy)
        else:
            result.verified_engines.append(engine)
    result.verified_engines.sort(key=lambda engine: engine.name)  # rows are locked in this order everywhere
    return result


async def sync_weights(db: Database, settings: Settings) -> None:
    """Load the serving version on every ready engine that has other weights and verifies no version.

    Engines are swapped in turn, so that the first can answer for all while the others are swapped.
    """
    async with db.read() as session:
        version = await inventory.serving_version(session)
        outdated = [
            engine for engine in await fleet.list_ready_engines(session) if not fleet.is_loaded(engine, version)
        ]
        outdated = [engine for engine in outdated if not await fleet.is_verifying(session, engine)]
    if not outdated:
        return
    name = _weights_name(version)
    try:
        if version.full_weights:
            await asyncio.to_thread(check_files, version, settings)
    except DamagedAdapter as error:
        log.error("%s serves, and cannot be loaded on %d engines: %s", name, len(outdated), error)
        return
    async with EnginePool(load_engine_keys(settings)) as pool:
        for engine in outdated:
            try:
                await swap_weights(db, settings, pool.get(engine), engine, version, Timings())
            except SWAP_ERRORS as error:
                log.warning("%s is not on %s, the next reconcile tries again: %s", name, engine.name, error)


async def has_outdated_engine(session: AsyncSession) -> bool:
    """Return whether a ready engine does not hold the serving version."""
    version = await inventory.serving_version(session)
    return any(not fleet.is_loaded(engine, version) for engine in await fleet.list_ready_engines(session))


async def swap_weights(
    db: Database, settings: Settings, client: EngineClient, engine: Engine, version: Version, timings: Timings
) -> None:
    """Give the engine the version's weights, whose files have been checked, and verify them.

    Raises:
        EngineUnavailable, EngineRefused, NotDelivered: the engine has its old weights again, or it gets no traffic
            until another swap has set its weights.
    """
    was_abandoned = engine.swapping_until is not None
    if not was_abandoned:
        await require_reachable(client)
    if fleet.is_loaded(engine, version):
        with timings.measure("verify"):
            await _verify_weights(client, version, settings, timings)
        return
    with timings.measure("exchange"):
        async with SwapLease(db, engine, settings.workers.lease_seconds) as lease:
            async with db.read() as session:
                previous = await inventory.version_with_weights(session, version.policy_id, engine.weights)
            with timings.measure("drain"):
                previous_scores = None if was_abandoned else await _score_previous(db, client, previous, version)
                await _wait_for_open_turns(db, settings, engine)
            try:
                with timings.measure("load"):
                    async with client.paused():
                        await _exclude_interrupted_turns(db, engine, version)
                        await client.load_weights(_weights_path(settings, version), _weights_name(version))
                with timings.measure("verify"):
                    await _verify_weights(client, version, settings, timings)
            except (EngineRefused, NotDelivered):
                await _restore_weights(settings, client, previous, version, previous_scores)
                await lease.finish(previous.weights)
                raise
            await lease.finish(version.weights)


async def _restore_weights(
    settings: Settings, client: EngineClient, previous: Version, failed: Version, previous_scores: Scores | None
) -> None:
    """Load the previous weights from the files they came from, and check that they score the probe as before."""
    try:
        if previous.full_weights:
            await asyncio.to_thread(check_files, previous, settings)
    except DamagedAdapter as error:  # not the fault of the version that was tried
        raise EngineUnavailable(f"{_weights_name(previous)} cannot be restored: {error}") from error
    async with client.paused():
        await client.load_weights(_weights_path(settings, previous), _weights_name(previous))
    if previous_scores is not None and failed.probe is not None:
        scores = await _score(client, previous, failed.probe["ids"])
        require_equal_scores(scores, previous_scores, settings)
    log.warning("%s has %s again", client.url, _weights_name(previous))


async def _score_previous(db: Database, client: EngineClient, previous: Version, version: Version) -> Scores | None:
    """Score the version's probe under the weights that the engine still has. Return None without a probe.

    These are the scores that the engine must give again if the weights are restored. The base model has no log-probs
    of a trainer: these become its probe.
    """
    if version.probe is None:
        return None
    scores = await _score(client, previous, version.probe["ids"])
    if previous.probe is None and previous.number == 0:
        async with db.write() as session:
            (await session.get_one(Version, previous.id)).probe = {"ids": version.probe["ids"], "logprobs": scores}
    return scores


async def _verify_weights(client: EngineClient, version: Version, settings: Settings, timings: Timings) -> None:
    if version.probe is None:  # the base model, before the first update
        return
    scores = await _score(client, version, version.probe["ids"])
    require_delivered(scores, version, settings, timings)


async def _score(client: EngineClient, version: Version, ids: Sequence[Sequence[int]]) -> list[list[float]]:
    return await client.score(None, ids, extra_key=_weights_name(version))


async def _wait_for_open_turns(db: Database, settings: Settings, engine: Engine) -> None:
    """Let the engine's open turns finish on the weights they started with, for at most `drain_seconds`."""
    deadline = time.monotonic() + settings.engine.drain_seconds
    while time.monotonic() < deadline:
        async with db.read() as session:
            if not await session.scalar(select(exists().where(*_open_turns_on(engine)))):
                return
        await asyncio.sleep(POLL_SECONDS)


async def _exclude_interrupted_turns(db: Database, engine: Engine, version: Version) -> None:
    """Exclude the turns that will continue on other weights from training.

    The engine is paused, so none of them can finish before this is committed.
    """
    reason = f"the weights changed during the reply, from {engine.weights or BASE_WEIGHTS} to {_weights_name(version)}"
    async with db.write() as session:
        await session.execute(
            update(Turn).where(*_open_turns_on(engine), Turn.exclusion_reason.is_(None)).values(exclusion_reason=reason)
        )


def _open_turns_on(engine: Engine) -> tuple[ColumnElement[bool], ...]:
    is_chat = and_(Turn.origin.in_(REQUESTED), Turn.engine == engine.name)
    # The turn of a rollout names its chat's engine until it has finished, so its own engine is on the rollout. A
    # rollout without a running lease waits in the queue and is on no engine.
    is_rollout = exists().where(Rollout.id == Turn.id, Rollout.engine == engine.name, Rollout.lease_until > now())
    return Turn.state == TurnState.OPEN, or_(is_chat, is_rollout)


def _weights_path(settings: Settings, version: Version) -> Path:
    return Path(version.adapter_path) if version.full_weights and version.adapter_path else model_dir(settings.model)


def _weights_name(version: Version) -> str:
    return version.weights or BASE_WEIGHTS


@dataclass
class SwapLease:
    """Holds an engine for a weight swap within its block: no chat is routed to the engine meanwhile.

    The exact value of `Engine.swapping_until` identifies the holder.
    """

    db: Database
    engine: Engine
    seconds: float
    _until: float | None = None
    # After a cancelled write the holder would not know the value of its lease.
    _write_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def __aenter__(self) -> Self:
        """Raise EngineBusy if another process holds the engine."""
        is_free = or_(Engine.swapping_until.is_(None), Engine.swapping_until < now())
        if not await self._write(is_free, now() + self.seconds):
            raise EngineBusy(f"the weights of {self.engine.name} are being swapped, or it was restarted")
        self._renewal = asyncio.create_task(self._keep_renewed())
        return self

    async def __aexit__(self, *error: object) -> None:
        """End a lease that was not finished.

        The engine's weights are unknown then. It gets no traffic, and the next swap may take it at once.
        """
        async with self._write_lock:
            self._renewal.cancel()
            if self._until is not None:
                await self._write(Engine.swapping_until == self._until, 0.0)

    async def finish(self, weights: str | None) -> None:
        """Record the weights that the engine has now and end the lease. Raise EngineBusy if the lease was lost."""
        async with self._write_lock:
            if not await self._write(Engine.swapping_until == self._until, None, weights=weights):
                raise EngineBusy(f"{self.engine.name} was taken by another weight swap, or restarted")

    async def _keep_renewed(self) -> None:
        while True:
            await asyncio.sleep(self.seconds / 4)
            async with self._write_lock:
                if self._until is None:
                    return  # finished while this waited for the lock
                try:
                    await self._write(Engine.swapping_until == self._until, now() + self.seconds)
                except (SQLAlchemyError, OSError) as error:  # the database may be back before the lease expires
                    log.warning("the weight swap on %s was not renewed: %s", self.engine.name, error)

    async def _write(
        self, condition: ColumnElement[bool], until: ColumnElement[float] | float | None, **values: str | None
    ) -> bool:
        async with self.db.write() as session:
            result = await session.execute(
                update(Engine)
                .where(Engine.name == self.engine.name, Engine.incarnation == self.engine.incarnation, condition)
                .values(swapping_until=until, **values)
                .returning(Engine.name, Engine.swapping_until)
            )
            row = result.one_or_none()
        if row is not None:
            self._until = row.swapping_until
        return row is not None
