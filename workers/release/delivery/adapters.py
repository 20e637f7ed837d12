"""Deliver adapters: load a version beside what serves, on all engines at once, under its own name."""

import asyncio
import base64
import hashlib
import json
import logging
import pickle
import time
from collections.abc import Sequence
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncSession

from alignment.artifacts.manifest import FileEntry, read_manifest
from alignment.artifacts.specs import ADAPTER, ADAPTER_CONFIG
from alignment.errors import DamagedAdapter
from alignment.release.gates import FunctionGate, MetricGate, PromptsGate
from app.core.database import Database
from app.core.settings import Settings
from app.deployments import comparison
from app.inference.engine import AdapterPayload, EngineClient
from app.inference.pool import EnginePool
from app.inference.transport import EngineRefused, EngineUnavailable
from app.models import Engine, Policy, Version
from workers.base_model import check_adapter_files
from workers.release.delivery.base import Attempt, Delivery, DeliveryResult, Trials
from workers.release.verify_delivery import (
    EngineUnreachable,
    NotDelivered,
    Timings,
    require_delivered,
    require_reachable,
)

log = logging.getLogger("attune.evaluate")
GRACE_SECONDS = 1.0  # for the slower engines, once enough of them have verified the version


class AdapterDelivery(Delivery):
    """An engine holds many adapters, so what serves stays loaded, and a version can be compared with it."""

    counts_unreached_gates = False
    tasks_after_release = ("reconcile", "assemble")

    async def deliver(self, attempt: Attempt) -> DeliveryResult:
        timings = attempt.timings
        result = await verify_on_engines(attempt.pool, attempt.engines, attempt.version, attempt.settings, timings)
        if result.is_verified:
            client = attempt.pool.get(result.verified_engines[0])
            with timings.measure("gates"):
                result.refusal = await attempt.gates.first_refusal(client, (MetricGate, FunctionGate, PromptsGate))
        return result

    async def sync(self, db: Database, settings: Settings) -> None:
        """The reconciler does that: see `workers.release.adapter_sync`. No version takes another one's place."""

    async def has_outdated_engine(self, session: AsyncSession) -> bool:
        return False

    def trials(self, policy: Policy, settings: Settings) -> Trials:
        shadow = comparison.effective_shadow(policy, settings)
        return Trials(shadow, comparison.effective_canary(policy, settings))


async def verify_on_engines(
    pool: EnginePool, engines: Sequence[Engine], version: Version, settings: Settings, timings: Timings
) -> DeliveryResult:
    """Load and verify the version on all engines in parallel.

    Returns when all have answered, or when enough have verified it and the others have had GRACE_SECONDS. The
    reconciler loads it on those later, and no chat is routed to them for this version until then.

    Raises:
        DamagedAdapter: the files are not the ones that were sealed.
    """
    preparation = asyncio.create_task(prepare_adapter(version, settings, timings))

    async def verify(client: EngineClient) -> None:
        with timings.measure("reach"):
            await require_reachable(client)
        adapter = await asyncio.shield(preparation)  # nothing is sent before the files are checked
        await load_and_verify(client, version, adapter, settings, timings)

    pending = {asyncio.create_task(verify(pool.get(engine))): engine for engine in engines}
    result, deadline = DeliveryResult(engines), None
    try:
        await preparation
        while pending:
            seconds_left = None if deadline is None else max(0.0, deadline - time.perf_counter())
            finished, _ = await asyncio.wait(pending, timeout=seconds_left, return_when=asyncio.FIRST_COMPLETED)
            if not finished:
                break
            for task in finished:
                _record_result(result, pending.pop(task), task, version)
            if deadline is None and result.is_verified:
                deadline = time.perf_counter() + GRACE_SECONDS
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    return result


def _record_result(result: DeliveryResult, engine: Engine, task: asyncio.Task[None], version: Version) -> None:
    error = task.exception()
    if error is None:
        result.add_verified(engine)
        return
    log.warning("%s is not on %s: %s", version.adapter_name, engine.name, error)
    result.num_unreachable += isinstance(error, EngineUnreachable)
    if isinstance(error, Exception):
        expected = isinstance(error, EngineUnavailable | EngineRefused | NotDelivered)
        result.errors.append(error if expected else EngineRefused(0, f"its answer was not understood: {error!r}"))


async def prepare_adapter(version: Version, settings: Settings, timings: Timings) -> Path | AdapterPayload:
    """Check the files and return what the engine is given: the directory, or the payload built from it.

    Raises:
        DamagedAdapter: the files are not the ones that were sealed.
        OSError: the storage cannot be read.
    """
    assert version.adapter_path and version.manifest_sha256
    directory = Path(version.adapter_path)
    with timings.measure("check"):
        await asyncio.to_thread(check_adapter_files, settings, directory, version.manifest_sha256)
    if settings.engine.adapter_delivery == "path":
        return directory
    with timings.measure("transfer"):
        return await asyncio.to_thread(build_payload, directory, version.manifest_sha256)


def preload_torch() -> None:
    """Import torch now, so that the first payload does not take seconds longer.

    Only `adapter_delivery = "memory"` needs torch in this process.
    """
    import safetensors.torch  # noqa: F401


def build_payload(directory: Path, manifest_sha256: str) -> AdapterPayload:
    """Return the adapter of a version as SGLang takes it within the load call, instead of a path on shared storage.

    SGLang dies of a payload that it cannot unpickle, so a payload is built only from the bytes that were sealed.

    Raises:
        DamagedAdapter: the files changed since the directory was checked.
    """
    files, _ = read_manifest(directory, manifest_sha256)
    config, tensors = (_read_sealed(directory, name, files) for name in (ADAPTER_CONFIG, ADAPTER))
    return pack_adapter(config, tensors)


def pack_adapter(config: bytes, tensors: bytes) -> AdapterPayload:
    """Return a payload of the contents of an adapter's two files.

    It is pickled tensors, which SGLang unpickles with an allow-list of its own. Nothing in it refers to this machine's
    memory, so the engine may run on another machine.
    """
    from safetensors.torch import load

    return AdapterPayload(json.loads(config), base64.b64encode(pickle.dumps(load(tensors))).decode())


def _read_sealed(directory: Path, name: str, files: dict[str, FileEntry]) -> bytes:
    content = (directory / name).read_bytes()
    if hashlib.sha256(content).hexdigest() != files[name]["sha256"]:
        raise DamagedAdapter(f"{name} in {directory} is not what was sealed.")
    return content


async def load_and_verify(
    client: EngineClient, version: Version, adapter: Path | AdapterPayload, settings: Settings, timings: Timings
) -> None:
    """Load the adapter, whose files have been checked, and compare the engine's log-probs of the probe with the
    trainer's.

    Loading leaves an adapter in host memory. The probe moves it to the device, so it also warms the adapter up.

    Raises:
        NotDelivered: the log-probs differ by more than the tolerance, or are nearer to the parent's.
        EngineUnavailable, EngineRefused: see EngineClient.
    """
    assert version.adapter_name and version.probe
    with timings.measure("load"):
        await client.load_adapter(version.adapter_name, adapter)
    with timings.measure("verify"):
        engine_scores = await client.score(version.adapter_name, version.probe["ids"])
    require_delivered(engine_scores, version, settings, timings)
