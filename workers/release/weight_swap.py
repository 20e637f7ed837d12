"""A version's full weights on a replica: nobody is sent there, replies under way end, the bytes are exchanged and
proven; or what was there before is put back.

An engine has one version's weights at a time. So to prove a version is to take a replica away from what serves: one
after the other, and no more of them than it takes for the version to go live.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from sqlalchemy import ColumnElement, and_, exists, or_, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.errors import DamagedAdapter
from app.core.database import Database, now
from app.core.settings import Settings
from app.inference.client import BASE_WEIGHTS, EngineClient
from app.inference.errors import EngineRefused, EngineUnavailable
from app.inference.keys import engine_keys
from app.inference.pool import EnginePool
from app.models import Engine, Origin, Rollout, Turn, TurnState, Version
from app.policies import service
from workers.base_model import folder
from workers.release import engine_inventory
from workers.release.verify_delivery import Away, NotDelivered, Outcome, Scores, Timings, apart, assure, check

log = logging.getLogger("attune.weights")
POLL_SECONDS = 0.02
TROUBLES = (EngineUnavailable, EngineRefused, NotDelivered)


class Busy(EngineUnavailable):
    """Somebody else exchanges its weights, or it was started anew."""


async def one_after_another(
    db: Database, settings: Settings, pool: EnginePool, engines: Sequence[Engine], version: Version, timings: Timings
) -> Outcome:
    """Until enough of the ready engines have proven it; the others go on with what serves. The files have been
    checked."""
    outcome = Outcome()
    for engine in sorted(engines, key=lambda engine: not service.holds(engine, version)):
        if service.enough(outcome.proven, engines):
            break
        try:
            await carry(db, settings, pool.at(engine.url), engine, version, timings)
        except TROUBLES as error:
            log.warning("%s is not on %s: %s", version.adapter_name, engine.name, error)
            outcome.troubles.append(error)
            outcome.away += isinstance(error, Away | Busy)
        else:
            outcome.proven.append(engine)
    outcome.proven.sort(key=lambda engine: engine.name)  # rows are locked in this order everywhere
    return outcome


async def follow(db: Database, settings: Settings) -> None:
    """What the pointer points to, on every ready engine that has other weights and is not proving some: first on one,
    which answers for all, then on the others."""
    async with db.read() as session:
        version = await engine_inventory.pointed(session)
        behind = [engine for engine in await service.ready_engines(session) if not service.holds(engine, version)]
        behind = [engine for engine in behind if not await service.proving(session, engine)]
    if not behind:
        return
    pool = EnginePool(engine_keys(settings))
    try:
        if version.full_weights:
            await asyncio.to_thread(check, version, settings)
        for engine in behind:
            try:
                await carry(db, settings, pool.at(engine.url), engine, version, Timings())
            except TROUBLES as error:
                log.warning("%s is not on %s, the next sweep tries again: %s", _name(version), engine.name, error)
    except DamagedAdapter as damage:
        log.error("%s serves, and cannot be put on %d engines: %s", _name(version), len(behind), damage)
    finally:
        await pool.close()


async def lagging(session: AsyncSession) -> bool:
    """Whether a ready engine has not what serves."""
    version = await engine_inventory.pointed(session)
    return any(not service.holds(engine, version) for engine in await service.ready_engines(session))


async def carry(
    db: Database, settings: Settings, client: EngineClient, engine: Engine, version: Version, timings: Timings
) -> None:
    """The files have been checked. Raises EngineUnavailable, EngineRefused, NotDelivered; then the engine has what it
    had, or nobody is sent there until somebody has set it right."""
    abandoned = engine.swapping_until is not None
    if not abandoned and not await client.ready() and not await client.ready():  # a moment's silence is no absence
        raise Away(f"{client.url} does not answer")
    if service.holds(engine, version):
        mark = time.perf_counter()
        await _prove(client, version, settings, timings)
        timings.since(mark, "verify")
        return
    mark = time.perf_counter()
    async with _moving(db, settings, engine) as move:
        async with db.read() as session:
            before = await engine_inventory.having(session, version.policy_id, engine.weights)
        said = None if abandoned else await _said(db, client, before, version)
        await _drain(db, settings, engine)
        step = timings.since(mark, "drain")
        try:
            await _exchange(db, settings, client, engine, version)
            step = timings.since(step, "load")
            await _prove(client, version, settings, timings)
            timings.since(step, "verify")
        except (EngineRefused, NotDelivered):
            await _put_back(settings, client, before, version, said)
            await move.done(before.weights)
            raise
        await move.done(version.weights)
    timings.since(mark, "exchange")


async def _exchange(db: Database, settings: Settings, client: EngineClient, engine: Engine, version: Version) -> None:
    async with client.paused():
        await _note_cut(db, engine, version)
        await client.load_weights(_path(settings, version), _name(version))


async def _put_back(
    settings: Settings, client: EngineClient, before: Version, failed: Version, said: Scores | None
) -> None:
    """The weights that were there, from the bytes that they were read from, and a look at whether they are the same."""
    try:
        if before.full_weights:
            await asyncio.to_thread(check, before, settings)
    except DamagedAdapter as damage:  # no fault of the version that was tried
        raise EngineUnavailable(f"{_name(before)} cannot be put back: {damage}") from damage
    async with client.paused():
        await client.load_weights(_path(settings, before), _name(before))
    if said is not None and failed.probe is not None:
        assure(apart(await _score(client, before, failed.probe["ids"]), said), settings)
    log.warning("%s has %s again", client.url, _name(before))


async def _said(db: Database, client: EngineClient, before: Version, version: Version) -> Scores | None:
    """The probe under the weights that are still there: what they must say again, should they be put back. The base
    model has no trainer's log-probs; these are its own from now on."""
    if version.probe is None:
        return None
    scores = await _score(client, before, version.probe["ids"])
    if before.probe is None and before.number == 0:
        async with db.write() as session:
            (await session.get_one(Version, before.id)).probe = {"ids": version.probe["ids"], "logprobs": scores}
    return scores


async def _prove(client: EngineClient, version: Version, settings: Settings, timings: Timings) -> None:
    if version.probe is None:  # the base model, before anything was learned from it
        return
    distance = apart(await _score(client, version, version.probe["ids"]), version.probe["logprobs"])
    timings.seconds["probe_distance"] = max(distance, timings.seconds.get("probe_distance", 0.0))
    assure(distance, settings)


async def _score(client: EngineClient, version: Version, ids: Sequence[Sequence[int]]) -> list[list[float]]:
    return await client.score(None, ids, extra_key=_name(version))


async def _drain(db: Database, settings: Settings, engine: Engine) -> None:
    """Replies end on the weights that they began with, if that does not take too long."""
    until = time.monotonic() + settings.drain_seconds
    while time.monotonic() < until:
        async with db.read() as session:
            if not await session.scalar(select(exists().where(*_under_way(engine)))):
                return
        await asyncio.sleep(POLL_SECONDS)


async def _note_cut(db: Database, engine: Engine, version: Version) -> None:
    """Replies that go on with other weights are nobody's to learn from. Said while none of them can end."""
    exclusion_reason = (
        f"the weights changed during the reply, from {engine.weights or BASE_WEIGHTS} to {_name(version)}"
    )
    async with db.write() as session:
        await session.execute(
            update(Turn)
            .where(*_under_way(engine), Turn.exclusion_reason.is_(None))
            .values(exclusion_reason=exclusion_reason)
            .execution_options(synchronize_session=False)
        )


def _under_way(engine: Engine) -> tuple[ColumnElement[bool], ...]:
    chat = and_(Turn.origin == Origin.CHAT, Turn.engine == engine.name)
    # A rollout's turn names its chat's engine until it has ended; and one that only waits is asked nowhere.
    asked = exists().where(Rollout.id == Turn.id, Rollout.engine == engine.name, Rollout.lease_until > now())
    return Turn.state == TurnState.OPEN, or_(chat, asked)


def _path(settings: Settings, version: Version) -> Path:
    return Path(version.adapter_path) if version.full_weights and version.adapter_path else folder(settings.model)


def _name(version: Version) -> str:
    return version.weights or BASE_WEIGHTS


class Move:
    """An engine that nobody is sent to while this is held. The deadline, to the digit, is who holds it."""

    def __init__(self, db: Database, engine: Engine, seconds: float) -> None:
        self._db, self._engine, self._seconds = db, engine, seconds
        self._until: float | None = None
        self.alone = asyncio.Lock()  # a write that is cut off would not know what it has written

    async def take(self) -> None:
        """Raises Busy."""
        mine = or_(Engine.swapping_until.is_(None), Engine.swapping_until < now())
        if not await self._write(mine, now() + self._seconds):
            raise Busy(f"the weights of {self._engine.name} are being exchanged, or it was started anew")

    async def keep(self) -> None:
        while True:
            await asyncio.sleep(self._seconds / 4)
            async with self.alone:
                try:
                    await self._write(Engine.swapping_until == self._until, now() + self._seconds)
                except (SQLAlchemyError, OSError) as error:  # it may be back before the time is over
                    log.warning("the exchange on %s was not kept alive: %s", self._engine.name, error)

    async def done(self, weights: str | None) -> None:
        """It has these weights. Raises Busy when somebody else has taken it meanwhile."""
        async with self.alone:
            if not await self._write(Engine.swapping_until == self._until, None, weights=weights):
                raise Busy(f"{self._engine.name} was taken by somebody else, or started anew")

    async def leave(self) -> None:
        """Who knows what it has: whoever comes next may set it right at once."""
        async with self.alone:
            if self._until is not None:
                await self._write(Engine.swapping_until == self._until, 0.0)

    async def _write(
        self, mine: ColumnElement[bool], until: ColumnElement[float] | float | None, **values: str | None
    ) -> bool:
        async with self._db.write() as session:
            done = await session.execute(
                update(Engine)
                .where(Engine.name == self._engine.name, Engine.incarnation == self._engine.incarnation, mine)
                .values(swapping_until=until, **values)
                .returning(Engine.name, Engine.swapping_until)
                .execution_options(synchronize_session=False)
            )
            row = done.one_or_none()
        if row is not None:
            self._until = row.swapping_until
        return row is not None


@asynccontextmanager
async def _moving(db: Database, settings: Settings, engine: Engine) -> AsyncIterator[Move]:
    move = Move(db, engine, settings.lease_seconds)
    await move.take()
    alive = asyncio.create_task(move.keep())
    try:
        yield move
    finally:
        async with move.alone:
            alive.cancel()
        await move.leave()
