"""Evaluate trained versions: load under its own name, verify delivery, run the gates, and publish at once."""

import logging
import time
from collections.abc import Sequence
from typing import Literal

from sqlalchemy import select

from alignment.errors import DamagedAdapter
from app.core import leases
from app.core.database import Database, database_time
from app.core.request_log import log_fields
from app.core.run_each import run_each, take_turns
from app.core.settings import Settings
from app.deployments import service as deployment_service
from app.engines import fleet, inventory
from app.inference.keys import load_engine_keys
from app.inference.pool import EnginePool
from app.inference.transport import EngineRefused, EngineUnavailable
from app.models import ANSWERING, Engine, Policy, Version, VersionState
from app.policies import repository
from app.policies.locks import lock_policy
from app.policies.overrides import effective_settings
from app.training import kl_guard
from workers.release import publish
from workers.release.delivery.base import Attempt, DeliveryResult
from workers.release.delivery.choice import delivery_of
from workers.release.gates import GateRunner
from workers.release.verify_delivery import Timings
from workers.stage_metrics import EVALUATIONS

log = logging.getLogger("attune.evaluate")


async def evaluate(db: Database, settings: Settings, owner: str) -> int:
    """Evaluate every trained version, the projects taking turns. Return how many were verified."""
    await delivery_of(settings).sync(db, settings)
    async with db.read() as session:
        trained = select(Policy.project_id, Version.id).join(Policy, Policy.id == Version.policy_id)
        is_waiting = (Version.state == VersionState.TRAINED, Policy.state.in_(ANSWERING))
        rows = await session.execute(trained.where(*is_waiting).order_by(Version.created_at, Version.id))
    return await run_each(
        take_turns(rows.tuples()), lambda id: _claim_and_evaluate(db, settings, owner, id), "the evaluation of"
    )


async def _claim_and_evaluate(db: Database, settings: Settings, owner: str, version_id: str) -> bool:
    """Evaluate the version if no other worker does. Return whether it was verified."""
    seconds = settings.workers.lease_seconds
    async with db.write() as session:
        engines = await fleet.list_ready_engines(session)
        if not engines:
            return False  # the reconciler enqueues it again when an engine is ready
        states = (VersionState.TRAINED,)
        fence = await leases.claim(session, Version, version_id, owner=owner, seconds=seconds, states=states)
        version = await session.get_one(Version, version_id)
        policy = await session.get_one(Policy, version.policy_id)
        waited = await database_time(session) - version.created_at
    if fence is None:
        return False
    timings = Timings({"export": version.timings["export"], "wait": waited})
    try:
        renewal = leases.keep_renewed(db, Version, version_id, fence=fence, seconds=seconds)
        with log_fields(policy=policy.name, version=str(version.adapter_name)):
            async with renewal:
                is_verified = await _evaluate(db, settings, policy, version, engines, timings)
    except leases.LeaseLost as error:
        log.warning("the evaluation was ended: %s", error)
        return False
    if not is_verified:  # an engine may hold it in the place of what serves
        await delivery_of(settings).sync(db, settings)
    return is_verified


async def _evaluate(
    db: Database, settings: Settings, policy: Policy, version: Version, engines: list[Engine], timings: Timings
) -> bool:
    """Return whether the version was verified. If not, it is rejected, or left for another attempt."""
    settings = effective_settings(policy, settings)
    if policy.head_version_id != version.id:
        return await _reject(db, version, "training returned to another version before this one was verified")
    if (reason := kl_guard.describe_violation(version, settings)) is not None:
        return await _reject(db, version, reason, guard=settings)
    delivery = delivery_of(settings)
    async with EnginePool(load_engine_keys(settings)) as pool:
        try:
            gates = GateRunner(db, settings, policy, version)
            result = await delivery.deliver(Attempt(db, settings, pool, engines, version, gates, timings))
        except DamagedAdapter as error:
            return await _reject(db, version, f"DamagedAdapter: {error}", engines)
        except OSError as error:  # the storage of the versions is away, full or slow, which says nothing of the version
            log.warning("%s waits: %s", version.adapter_name, error)
            return await _retry(db, settings, version, str(error), engines, counts=False)
        except (EngineUnavailable, EngineRefused) as error:  # during a gate's prompts: the gate has decided nothing
            log.warning("%s waits: %s", version.adapter_name, error)
            reason = f"its gates could not be reached in {version.attempt} attempts: {error}"
            return await _retry(db, settings, version, reason, engines, counts=delivery.counts_unreached_gates)
    if result.refusal is not None:
        return await _reject(db, version, result.refusal, engines, guard=settings)
    if not result.is_verified:
        return await _reject_or_retry(db, settings, version, result)
    values = {"timings": timings.seconds, "metrics": {**version.metrics, **gates.metrics}, "attempt": 0}
    started = time.perf_counter()
    async with db.write() as session:  # verified and published in one transaction
        locked = await lock_policy(session, policy.id)
        for engine in result.verified_engines:
            await inventory.record_adapters(session, engine, added=version.adapter)
        await leases.finish(session, Version, version.id, fence=version.fence, state=VersionState.VERIFIED, **values)
        serves_users = await publish.try_publish(locked, settings, delivery, version.id)
    EVALUATIONS.labels("verified").inc()
    if serves_users:
        await publish.record_timings(db, version.id, time.perf_counter() - started)
    return True


async def _reject_or_retry(
    db: Database, settings: Settings, version: Version, result: DeliveryResult
) -> Literal[False]:
    """Reject a version that too few engines have verified, or leave it for another attempt. Return False.

    The attempt does not count if an engine verified the version, since then it takes no engine down, or if an engine
    was unreachable before the version was sent to it.
    """
    counts = not (result.verified_engines or result.num_unreachable)
    if (rejection := result.rejection) is not None:
        return await _reject(db, version, f"{type(rejection).__name__}: {rejection}", result.engines)
    reason = f"not verified in {version.attempt} attempts: {result.errors[0]}"
    return await _retry(db, settings, version, reason, result.engines, counts=counts)


async def _retry(
    db: Database, settings: Settings, version: Version, reason: str, engines: Sequence[Engine], *, counts: bool
) -> Literal[False]:
    """Leave the version for another attempt, or reject it for `reason` after the last one that counts. Return False."""
    if counts and version.attempt >= settings.workers.max_attempts:
        return await _reject(db, version, reason, engines)
    EVALUATIONS.labels("retried").inc()
    attempt = version.attempt if counts else version.attempt - 1
    async with db.write() as session:
        state = VersionState.TRAINED
        await leases.finish(session, Version, version.id, fence=version.fence, state=state, attempt=attempt)
    return False


async def _reject(
    db: Database, version: Version, reason: str, engines: Sequence[Engine] = (), guard: Settings | None = None
) -> Literal[False]:
    """Reject the version: it never serves, and training continues from the serving version. Return False.

    `engines` may hold it. It is recorded on them, so that the reconciler unloads it. With `guard` it is an alarm.
    """
    log.warning("%s is rejected: %s", version.adapter_name, reason)
    EVALUATIONS.labels("rejected").inc()
    async with db.write() as session:
        # The policy is locked before its versions, as everywhere.
        locked = await lock_policy(session, version.policy_id)
        state = VersionState.REJECTED
        await leases.finish(session, Version, version.id, fence=version.fence, state=state, reason=reason)
        for engine in engines:
            await inventory.record_adapters(session, engine, added=version.adapter)
        row = await repository.get_version(session, version.id)
        await deployment_service.reject_version(locked, row, actor="evaluate", reason=reason, guard=guard)
    return False
