"""Trained version → proven version: loaded under its own name, warmed, and shown to be what the trainer made."""

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import select

from alignment.errors import DamagedAdapter
from app.config import Settings
from app.db import Database
from app.engine.client import EngineClient
from app.engine.errors import EngineRefused, EngineUnavailable
from app.engine.keys import engine_keys
from app.engine.pool import EnginePool
from app.jobs import nudge
from app.models import Deployment, Engine, Policy, Version, VersionState, lease, record
from app.policies import service
from workers import ledger
from workers.base_model import check_version

log = logging.getLogger("attune.evaluate")

# Largest |engine - trainer| log-prob over the probe that counts as the same weights. Measured in float32: below 1e-5.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}


class NotDelivered(Exception):
    """The engine does not compute what the trainer computed: these are not the weights that were trained."""


@dataclass
class Timings:
    """Seconds by phase, on one clock."""

    seconds: dict[str, float] = field(default_factory=dict)

    def since(self, started: float, phase: str) -> float:
        ended = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + ended - started
        return ended


async def evaluate(db: Database, settings: Settings, owner: str) -> int:
    """Prove every version that waits. Returns how many were proven."""
    proven = 0
    async with db.read() as session:
        if not await service.ready_engines(session):
            return 0  # the sweep rings again when one is back
        waiting = list(await session.scalars(select(Version.id).where(Version.state == VersionState.TRAINED)))
    for version_id in waiting:
        async with db.write() as session:
            fence = await lease.claim(
                session,
                Version,
                version_id,
                owner=owner,
                seconds=settings.lease_seconds,
                states=(VersionState.TRAINED,),
            )
        if fence is not None:
            async with lease.kept(db, Version, version_id, fence=fence, seconds=settings.lease_seconds):
                proven += await _evaluate(db, settings, version_id, fence)
    return proven


async def _evaluate(db: Database, settings: Settings, version_id: str, fence: int) -> bool:
    async with db.read() as session:
        version = await session.get_one(Version, version_id)
        policy = await session.get_one(Policy, version.policy_id)
        engines = await service.ready_engines(session)
    if policy.head_version_id != version.id:
        await _reject(db, version, fence, "learning went back to another version before this one was proven", [])
        return False
    timings = Timings(dict(version.timings))
    pool = EnginePool(engine_keys(settings))
    try:
        for engine in engines:
            await prove(pool.at(engine.url), version, settings, timings)
    except (DamagedAdapter, NotDelivered, EngineRefused) as refusal:
        await _reject(db, version, fence, f"{type(refusal).__name__}: {refusal}", engines)
        return False
    except EngineUnavailable as error:
        if version.attempt >= settings.max_attempts:  # it may be the version that takes the engine down
            await _reject(db, version, fence, f"not proven in {version.attempt} attempts: {error}", engines)
            return False
        log.warning("%s waits: %s", version.adapter_name, error)
        await _let_go(db, version, fence)
        return False
    finally:
        await pool.close()
    async with db.write() as session:
        for engine in engines:
            await ledger.note(session, engine, added=version.adapter_name)
        await lease.settle(
            session, Version, version.id, fence=fence, state=VersionState.PROVEN, timings=timings.seconds
        )
    return True


async def prove(client: EngineClient, version: Version, settings: Settings, timings: Timings) -> None:
    """Check the files, load, warm, and compare the engine's log-probs of the probe with the trainer's."""
    assert version.adapter_name and version.adapter_path and version.manifest_sha256 and version.probe
    path = Path(version.adapter_path)
    mark = time.perf_counter()
    check_version(settings.model, path, version.manifest_sha256)
    mark = timings.since(mark, "check")
    await client.load_adapter(version.adapter_name, path)
    mark = timings.since(mark, "load")
    await client.warm(version.adapter_name)
    mark = timings.since(mark, "warm")
    heard = await client.score(version.adapter_name, version.probe["ids"])
    distance = max(
        abs(engine - trainer)
        for engine_row, trainer_row in zip(heard, version.probe["logprobs"], strict=True)
        for engine, trainer in zip(engine_row, trainer_row, strict=True)
    )
    timings.since(mark, "verify")
    timings.seconds["probe_distance"] = distance
    bound = settings.probe_tolerance or TOLERANCE[settings.dtype]
    if not distance <= bound:
        raise NotDelivered(
            f"the engine's log-probs of the probe differ from the trainer's by {distance:.3g} (bound {bound:g})"
        )


async def _let_go(db: Database, version: Version, fence: int) -> None:
    async with db.write() as session:
        await lease.settle(session, Version, version.id, fence=fence, state=VersionState.TRAINED)


async def _reject(db: Database, version: Version, fence: int, reason: str, engines: list[Engine]) -> None:
    """The version never serves; learning goes back to the one that does. Engines may hold it: the sweep unloads it."""
    log.warning("%s is rejected: %s", version.adapter_name, reason)
    async with db.write() as session:
        await lease.settle(session, Version, version.id, fence=fence, state=VersionState.REJECTED, reason=reason)
        for engine in engines:
            await ledger.note(session, engine, added=version.adapter_name)
        policy = await session.get_one(Policy, version.policy_id, with_for_update=True)
        if policy.head_version_id == version.id:
            deployment = await session.get_one(Deployment, policy.id)
            policy.head_version_id = deployment.version_id
        label = service.label(policy, version)
        record(session, "evaluate", "version rejected", label, reason, project_id=policy.project_id)
        nudge(session, "assemble")
