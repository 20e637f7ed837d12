"""Evaluate trained versions: load under its own name, verify delivery, run the gates, and publish at once."""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any, Literal

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.errors import DamagedAdapter
from alignment.release.gates import FunctionGate, MetricGate, PromptsGate
from app.core import leases
from app.core.database import Database
from app.core.request_log import log_fields
from app.core.run_each import run_each, take_turns
from app.core.settings import Settings
from app.deployments import service as deployment_service
from app.inference.keys import load_engine_keys
from app.inference.pool import EnginePool
from app.inference.transport import EngineRefused, EngineUnavailable
from app.models import ANSWERING, Engine, Policy, Version, VersionState
from app.policies import repository, service
from app.policies.locks import lock_policy
from app.policies.overrides import effective_settings
from app.training import kl_guard
from workers.release import engine_inventory, publish, weight_swap
from workers.release.gates import GateRunner
from workers.release.verify_delivery import Timings, VerificationResult, check_files, verify_on_engines
from workers.stage_metrics import EVALUATIONS

log = logging.getLogger("attune.evaluate")


async def evaluate(db: Database, settings: Settings, owner: str) -> int:
    """Evaluate every trained version, the projects taking turns. Return how many were verified."""
    if settings.trainer.adaptation == "full":
        await weight_swap.sync_weights(db, settings)
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
        engines = await service.list_ready_engines(session)
        if not engines:
            return False  # the reconciler enqueues it again when an engine is ready
        states = (VersionState.TRAINED,)
        fence = await leases.claim(session, Version, version_id, owner=owner, seconds=seconds, states=states)
        version = await session.get_one(Version, version_id)
        policy = await session.get_one(Policy, version.policy_id)
    if fence is None:
        return False
    try:
        renewal = leases.keep_renewed(db, Version, version_id, fence=fence, seconds=seconds)
        with log_fields(policy=policy.name, version=str(version.adapter_name)):
            async with renewal:
                is_verified = await _evaluate(db, settings, policy, version, engines)
    except leases.LeaseLost as error:
        log.warning("the evaluation was ended: %s", error)
        return False
    if settings.trainer.adaptation == "full" and not is_verified:  # an engine may hold it: load what serves again
        await weight_swap.sync_weights(db, settings)
    return is_verified


async def _evaluate(db: Database, settings: Settings, policy: Policy, version: Version, engines: list[Engine]) -> bool:
    """Return whether the version was verified. If not, it is rejected, or left for another attempt."""
    settings = effective_settings(policy, settings)
    if policy.head_version_id != version.id:
        return await _reject(db, version, "training returned to another version before this one was verified")
    if (reason := kl_guard.describe_violation(version, settings)) is not None:
        return await _reject(db, version, reason, guard=settings)
    timings = Timings({"export": version.timings["export"]})
    async with EnginePool(load_engine_keys(settings)) as pool:
        try:
            gates = GateRunner(db, settings, pool.get(engines[0]), policy, version)
            if version.full_weights:  # a swap holds chats up, so the gates that need no engine come first
                with timings.measure("check"):
                    await asyncio.to_thread(check_files, version, settings)
                if (refusal := await gates.first_refusal(MetricGate, FunctionGate)) is not None:
                    return await _reject(db, version, refusal, guard=settings)
                result = await weight_swap.verify_on_engines_in_turn(db, settings, pool, engines, version, timings)
            else:
                result = await verify_on_engines(pool, engines, version, settings, timings)
            if not service.has_quorum(result.verified_engines, engines):
                return await _reject_or_retry(db, settings, version, result, engines)
            gates.client = pool.get(result.verified_engines[0])
            with timings.measure("gates"):
                refusal = await gates.first_refusal(*([PromptsGate] if version.full_weights else []))
        except DamagedAdapter as error:
            return await _reject(db, version, f"DamagedAdapter: {error}", engines)
        except (EngineUnavailable, EngineRefused) as error:  # during a gate's prompts: the gate has decided nothing
            log.warning("%s waits: %s", version.adapter_name, error)
            if (
                version.full_weights and version.attempt >= settings.workers.max_attempts
            ):  # each attempt costs two weight swaps
                reason = f"its gates could not be reached in {version.attempt} attempts: {error}"
                return await _reject(db, version, reason, engines)
            return await _release_claim(db, version, counts=version.full_weights)
    if refusal is not None:
        return await _reject(db, version, refusal, engines, guard=settings)
    values = {"timings": timings.seconds, "metrics": {**version.metrics, **gates.metrics}, "attempt": 0}
    started = time.perf_counter()
    async with db.write() as session:  # verified and published in one transaction
        locked = await lock_policy(session, policy.id)
        for engine in result.verified_engines:
            await engine_inventory.record_adapters(session, engine, added=version.adapter)
        await _finish(session, version, VersionState.VERIFIED, **values)
        serves_users = await publish.try_publish(locked, settings, version.id)
    EVALUATIONS.labels("verified").inc()
    if serves_users:
        await publish.record_timings(db, version.id, time.perf_counter() - started)
    return True


async def _reject_or_retry(
    db: Database, settings: Settings, version: Version, result: VerificationResult, engines: list[Engine]
) -> Literal[False]:
    """Reject a version that too few engines have verified, or leave it for another attempt. Return False.

    The attempt does not count if an engine verified the version, since then it takes no engine down, or if an engine
    was unreachable before the version was sent to it.
    """
    counts = not (result.verified_engines or result.num_unreachable)
    if (rejection := result.rejection) is not None:
        return await _reject(db, version, f"{type(rejection).__name__}: {rejection}", engines)
    if counts and version.attempt >= settings.workers.max_attempts:
        return await _reject(db, version, f"not verified in {version.attempt} attempts: {result.errors[0]}", engines)
    return await _release_claim(db, version, counts=counts)


async def _release_claim(db: Database, version: Version, *, counts: bool) -> Literal[False]:
    """Leave the version for another attempt; `counts` tells whether this one is counted. Return False."""
    EVALUATIONS.labels("retried").inc()
    attempt = version.attempt if counts else version.attempt - 1
    async with db.write() as session:
        await _finish(session, version, VersionState.TRAINED, attempt=attempt)
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
        await _finish(session, version, VersionState.REJECTED, reason=reason)
        for engine in engines:
            await engine_inventory.record_adapters(session, engine, added=version.adapter)
        row = await repository.get_version(session, version.id)
        await deployment_service.reject_version(locked, row, actor="evaluate", reason=reason, guard=guard)
    return False


async def _finish(session: AsyncSession, version: Version, state: VersionState, **values: Any) -> None:
    await leases.finish(session, Version, version.id, fence=version.fence, state=state, **values)
