"""Trained version → proven version: loaded under its own name, warmed, shown to be what the trainer made, and let
through by the gates. Then it is published at once."""

import asyncio
import logging
import time

from sqlalchemy import select

from alignment.errors import DamagedAdapter
from alignment.release.gates import FunctionGate, MetricGate, PromptsGate
from app.core import leases
from app.core.database import Database
from app.core.settings import Settings
from app.deployments import service as deployment_service
from app.inference.errors import EngineRefused, EngineUnavailable
from app.inference.keys import engine_keys
from app.inference.pool import EnginePool
from app.models import Engine, Policy, Version, VersionState
from app.policies import repository, service
from app.training import kl_guard
from workers.release import engine_inventory, publish, weight_swap
from workers.release.gates import Gates
from workers.release.verify_delivery import Outcome, Timings, check, everywhere

log = logging.getLogger("attune.evaluate")


async def evaluate(db: Database, settings: Settings, owner: str) -> int:
    """Prove every version that waits. Returns how many were proven."""
    proven, seconds = 0, settings.lease_seconds
    if settings.adaptation == "full":
        await weight_swap.follow(db, settings)
    async with db.read() as session:
        waiting = list(await session.scalars(select(Version.id).where(Version.state == VersionState.TRAINED)))
    for version_id in waiting:
        async with db.write() as session:
            engines = await service.ready_engines(session)
            if not engines:
                break  # the sweep rings again when one is back
            states = (VersionState.TRAINED,)
            fence = await leases.claim(session, Version, version_id, owner=owner, seconds=seconds, states=states)
            version = await session.get_one(Version, version_id)
            policy = await session.get_one(Policy, version.policy_id)
        if fence is not None:
            async with leases.keep_renewed(db, Version, version_id, fence=fence, seconds=seconds):
                done = await _evaluate(db, settings, policy, version, fence, engines)
            proven += done
            if settings.adaptation == "full" and not done:  # a replica may have it: back to what serves
                await weight_swap.follow(db, settings)
    return proven


async def _evaluate(
    db: Database, settings: Settings, policy: Policy, version: Version, fence: int, engines: list[Engine]
) -> bool:
    if policy.head_version_id != version.id:
        await _reject(db, version, fence, "learning went back to another version before this one was proven", [])
        return False
    if (reason := kl_guard.too_far(version, settings)) is not None:
        await _reject(db, version, fence, reason, [], alarm=settings)
        return False
    timings = Timings({"export": version.timings["export"]})
    pool = EnginePool(engine_keys(settings))
    try:
        gates, mark = Gates(db, settings, pool.at(engines[0].url), policy, version), time.perf_counter()
        if version.full_weights:  # chats wait while an engine has its weights: what needs none of them is asked first
            await asyncio.to_thread(check, version, settings)
            timings.since(mark, "check")
            if (refused := await gates.refusal(MetricGate, FunctionGate)) is not None:
                await _reject(db, version, fence, refused, [], alarm=settings)
                return False
            outcome = await weight_swap.one_after_another(db, settings, pool, engines, version, timings)
        else:
            outcome = await everywhere(pool, engines, version, settings, timings)
        if not service.enough(outcome.proven, engines):
            return await _too_few(db, settings, version, fence, outcome, engines)
        gates.client, mark = pool.at(outcome.proven[0].url), time.perf_counter()
        refused = await gates.refusal(*([PromptsGate] if version.full_weights else []))
        timings.since(mark, "gates")
    except DamagedAdapter as damage:
        await _reject(db, version, fence, f"DamagedAdapter: {damage}", engines)
        return False
    except (EngineUnavailable, EngineRefused) as error:  # of a gate's prompts: they are no verdict
        log.warning("%s waits: %s", version.adapter_name, error)
        if version.full_weights and version.attempt >= settings.max_attempts:  # each is two exchanges
            why = f"its gates could not be asked in {version.attempt} attempts: {error}"
            await _reject(db, version, fence, why, engines)
        else:
            await _let_go(db, version, fence, counts=version.full_weights)
        return False
    finally:
        await pool.close()
    if refused is not None:
        await _reject(db, version, fence, refused, engines, alarm=settings)
        return False
    told = {"timings": timings.seconds, "metrics": {**version.metrics, **gates.figures}, "attempt": 0}
    started = time.perf_counter()
    async with db.write() as session:  # one for both: proven and published
        policy = await session.get_one(Policy, policy.id, with_for_update={"key_share": True})
        for engine in outcome.proven:
            await engine_inventory.note(session, engine, added=version.adapter)
        await leases.finish(session, Version, version.id, fence=fence, state=VersionState.VERIFIED, **told)
        heard = await publish.move(session, settings, policy, version.id)
    if heard:
        await publish.timed(db, version.id, time.perf_counter() - started)
    return True


async def _too_few(
    db: Database, settings: Settings, version: Version, fence: int, outcome: Outcome, engines: list[Engine]
) -> bool:
    """Refused, or to be tried again. What one replica has proven does not take others down; nor does a version do
    anything to those that were away before."""
    if (refusal := outcome.refusal) is not None:
        await _reject(db, version, fence, f"{type(refusal).__name__}: {refusal}", engines)
    elif outcome.proven or outcome.away:
        await _let_go(db, version, fence, counts=False)
    elif version.attempt >= settings.max_attempts:
        told = f"not proven in {version.attempt} attempts: {outcome.troubles[0]}"
        await _reject(db, version, fence, told, engines)
    else:
        await _let_go(db, version, fence)
    return False


async def _let_go(db: Database, version: Version, fence: int, *, counts: bool = True) -> None:
    attempt = version.attempt if counts else version.attempt - 1
    async with db.write() as session:
        await leases.finish(session, Version, version.id, fence=fence, state=VersionState.TRAINED, attempt=attempt)


async def _reject(
    db: Database, version: Version, fence: int, reason: str, engines: list[Engine], alarm: Settings | None = None
) -> None:
    """The version never serves; learning goes back to the one that does. Engines may hold it: the sweep unloads it."""
    log.warning("%s is rejected: %s", version.adapter_name, reason)
    async with db.write() as session:
        # Before its versions, as everywhere.
        policy = await session.get_one(Policy, version.policy_id, with_for_update={"key_share": True})
        await leases.finish(session, Version, version.id, fence=fence, state=VersionState.REJECTED, reason=reason)
        for engine in engines:
            await engine_inventory.note(session, engine, added=version.adapter)
        row = await repository.version(session, version.id)
        await deployment_service.reject(session, policy, row, actor="evaluate", reason=reason, alarm=alarm)
