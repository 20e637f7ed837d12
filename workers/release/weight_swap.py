"""Swap the full weights of an engine: drain it, load the version's weights, verify them, or restore the old ones.

Which engines are swapped, and when: see `workers.release.delivery.full_weights`.
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

from alignment.errors import DamagedAdapter
from app.core.database import Database, now
from app.core.settings import Settings
from app.engines import fleet, inventory
from app.inference.engine import BASE_WEIGHTS, EngineClient
from app.inference.transport import EngineRefused, EngineUnavailable
from app.models import REQUESTED, Engine, Rollout, Turn, TurnState, Version
from workers.base_model import check_weights_files, model_dir
from workers.release.verify_delivery import (
    NotDelivered,
    Scores,
    Timings,
    require_delivered,
    require_equal_scores,
    require_reachable,
)

log = logging.getLogger("attune.weights")
POLL_SECONDS = 0.02
SWAP_ERRORS = (EngineUnavailable, EngineRefused, NotDelivered)


class EngineBusy(EngineUnavailable):
    """Another process swaps the engine's weights, or the engine was restarted."""


async def require_intact_weights(version: Version, settings: Settings) -> None:
    """Raise DamagedAdapter if the version's files are not the ones that were sealed. The base model has no seal."""
    if version.weights is not None:
        assert version.adapter_path and version.manifest_sha256
        directory = Path(version.adapter_path)
        await asyncio.to_thread(check_weights_files, settings, directory, version.manifest_sha256)


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
                        await client.load_weights(_weights_path(settings, version), weights_name(version))
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
        await require_intact_weights(previous, settings)
    except DamagedAdapter as error:  # not the fault of the version that was tried
        raise EngineUnavailable(f"{weights_name(previous)} cannot be restored: {error}") from error
    async with client.paused():
        await client.load_weights(_weights_path(settings, previous), weights_name(previous))
    if previous_scores is not None and failed.probe is not None:
        scores = await _score(client, previous, failed.probe["ids"])
        require_equal_scores(scores, previous_scores, settings)
    log.warning("%s has %s again", client.url, weights_name(previous))


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
    return await client.score(None, ids, extra_key=weights_name(version))


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
    reason = f"the weights changed during the reply, from {engine.weights or BASE_WEIGHTS} to {weights_name(version)}"
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
    return Path(version.adapter_path) if version.adapter_path is not None else model_dir(settings.model)


def weights_name(version: Version) -> str:
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
