"""Deliver full weights: swap the weights of one engine after the other.

An engine holds the weights of one version at a time. Verifying a version therefore takes an engine away from the
serving version, so engines are swapped in turn, and no more of them than the version needs to go live.
"""

import logging

from sqlalchemy.ext.asyncio import AsyncSession

from alignment.errors import DamagedAdapter
from alignment.release.gates import FunctionGate, MetricGate, PromptsGate
from app.core.database import Database
from app.core.settings import Settings
from app.engines import fleet, inventory
from app.inference.keys import load_engine_keys
from app.inference.pool import EnginePool
from app.inference.transport import EngineRefused, EngineUnavailable
from app.models import Policy
from workers.release.delivery.base import Attempt, Delivery, DeliveryResult, Trials
from workers.release.verify_delivery import EngineUnreachable, NotDelivered, Timings
from workers.release.weight_swap import EngineBusy, require_intact_weights, swap_weights, weights_name

log = logging.getLogger("attune.weights")
SWAP_ERRORS = (EngineUnavailable, EngineRefused, NotDelivered)


class FullWeightsDelivery(Delivery):
    """A swap holds chats up, so what needs no engine comes first, and an attempt that swapped in vain counts."""

    counts_unreached_gates = True
    tasks_after_release = ("reconcile", "assemble", "evaluate")  # the last loads it on the other engines

    async def deliver(self, attempt: Attempt) -> DeliveryResult:
        with attempt.timings.measure("check"):
            await require_intact_weights(attempt.version, attempt.settings)
        client = attempt.pool.get(attempt.engines[0])
        refusal = await attempt.gates.first_refusal(client, (MetricGate, FunctionGate))
        if refusal is not None:
            return DeliveryResult(attempt.engines, refusal=refusal)
        result = await _verify_in_turn(attempt)
        if result.is_verified:
            client = attempt.pool.get(result.verified_engines[0])
            with attempt.timings.measure("gates"):
                result.refusal = await attempt.gates.first_refusal(client, (PromptsGate,))
        return result

    async def sync(self, db: Database, settings: Settings) -> None:
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
        name = weights_name(version)
        try:
            await require_intact_weights(version, settings)
        except DamagedAdapter as error:
            log.error("%s serves, and cannot be loaded on %d engines: %s", name, len(outdated), error)
            return
        async with EnginePool(load_engine_keys(settings)) as pool:
            for engine in outdated:
                try:
                    await swap_weights(db, settings, pool.get(engine), engine, version, Timings())
                except SWAP_ERRORS as error:
                    log.warning("%s is not on %s, the next reconcile tries again: %s", name, engine.name, error)

    async def has_outdated_engine(self, session: AsyncSession) -> bool:
        version = await inventory.serving_version(session)
        return any(not fleet.is_loaded(engine, version) for engine in await fleet.list_ready_engines(session))

    def trials(self, policy: Policy, settings: Settings) -> Trials:
        """Return none: they need two versions on one engine."""
        return Trials()


async def _verify_in_turn(attempt: Attempt) -> DeliveryResult:
    """Swap and verify the version, whose files have been checked, until enough of the ready engines hold it.

    The other engines keep the serving version.
    """
    version, result = attempt.version, DeliveryResult(attempt.engines)
    for engine in sorted(attempt.engines, key=lambda engine: not fleet.is_loaded(engine, version)):
        if result.is_verified:
            break
        try:
            client = attempt.pool.get(engine)
            await swap_weights(attempt.db, attempt.settings, client, engine, version, attempt.timings)
        except SWAP_ERRORS as error:
            log.warning("%s is not on %s: %s", version.adapter_name, engine.name, error)
            result.errors.append(error)
            result.num_unreachable += isinstance(error, EngineUnreachable | EngineBusy)
        else:
            result.add_verified(engine)
    return result
