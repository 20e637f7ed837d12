"""One version on all replicas: loaded under its own name, warmed, and shown to be what the trainer made."""

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from app.core.settings import Settings
from app.inference.client import EngineClient, Payload
from app.inference.errors import EngineRefused, EngineUnavailable
from app.inference.pool import EnginePool
from app.models import Engine, Version
from app.policies import service
from workers.base_model import check_version
from workers.engine.adapter_payload import payload

log = logging.getLogger("attune.evaluate")
Scores = Sequence[Sequence[float]]
GRACE_SECONDS = 1.0  # for the slower replicas, once enough of them have proven a version
# Largest |engine - trainer| log-prob over the probe that counts as the same weights. Measured in float32: below 1e-5.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}


class NotDelivered(Exception):
    """The engine does not compute what the trainer computed: these are not the weights that were trained."""


@dataclass
class Timings:
    """Seconds by phase, on one clock."""

    seconds: dict[str, float] = field(default_factory=dict)

    def since(self, started: float, phase: str) -> float:
        """Of replicas that work side by side the slowest counts."""
        ended = time.perf_counter()
        self.seconds[phase] = max(self.seconds.get(phase, 0.0), ended - started)
        return ended


@dataclass
class Outcome:
    """On which replicas it was proven, in their order; what the others said; and who was away from the start."""

    proven: list[Engine] = field(default_factory=list)
    troubles: list[Exception] = field(default_factory=list)
    away: int = 0

    @property
    def refusal(self) -> Exception | None:
        """The first that is about the version, and not about a replica that cannot be reached."""
        return next((error for error in self.troubles if not isinstance(error, EngineUnavailable)), None)


async def everywhere(
    pool: EnginePool, engines: Sequence[Engine], version: Version, settings: Settings, timings: Timings
) -> Outcome:
    """Side by side. Returns when all have answered, or when enough have proven it and the others have had their grace:
    the sweep brings it to them, and nobody is sent to them for it until then. Raises DamagedAdapter."""
    checked = asyncio.create_task(ready_to_load(version, settings, timings))
    working = {
        asyncio.create_task(_prove(pool.at(engine.url), version, settings, timings, checked)): engine
        for engine in engines
    }
    outcome, until = Outcome(), None
    try:
        await checked
        while working:
            left = None if until is None else max(0.0, until - time.perf_counter())
            ended, _ = await asyncio.wait(working, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not ended:
                break
            for task in ended:
                _note(outcome, working.pop(task), task, version)
            if until is None and service.enough(outcome.proven, engines):
                until = time.perf_counter() + GRACE_SECONDS
    finally:
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
    outcome.proven.sort(key=lambda engine: engine.name)  # rows are locked in this order everywhere
    return outcome


class Away(EngineUnavailable):
    """It was not there before anything was asked of it: nothing that a version could have done."""


async def _prove(
    client: EngineClient, version: Version, settings: Settings, timings: Timings, checked: asyncio.Task[Path | Payload]
) -> None:
    if not await client.ready() and not await client.ready():  # a moment's silence is no absence
        raise Away(f"{client.url} does not answer")
    adapter = await asyncio.shield(checked)  # no byte of it before
    await prove(client, version, adapter, settings, timings)


def _note(outcome: Outcome, engine: Engine, task: asyncio.Task[None], version: Version) -> None:
    error = task.exception()
    if error is None:
        outcome.proven.append(engine)
        return
    log.warning("%s is not on %s: %s", version.adapter_name, engine.name, error)
    outcome.away += isinstance(error, Away)
    if isinstance(error, Exception):
        expected = isinstance(error, EngineUnavailable | EngineRefused | NotDelivered)
        outcome.troubles.append(error if expected else EngineRefused(0, f"its answer was not understood: {error!r}"))


def check(version: Version, settings: Settings) -> None:
    assert version.adapter_path and version.manifest_sha256
    check_version(settings.model, Path(version.adapter_path), version.manifest_sha256, full=version.full_weights)


async def ready_to_load(version: Version, settings: Settings, timings: Timings) -> Path | Payload:
    """What an engine is given: the folder, or all that is in it. Raises DamagedAdapter, and OSError of the storage."""
    assert version.adapter_path and version.manifest_sha256
    folder, mark = Path(version.adapter_path), time.perf_counter()
    await asyncio.to_thread(check, version, settings)
    mark = timings.since(mark, "check")
    if settings.adapter_delivery == "path":
        return folder
    made = await asyncio.to_thread(payload, folder, version.manifest_sha256)
    timings.since(mark, "transfer")
    return made


async def prove(
    client: EngineClient, version: Version, adapter: Path | Payload, settings: Settings, timings: Timings
) -> None:
    """Load, and compare the engine's log-probs of the probe with the trainer's. Loading leaves an adapter in host
    memory; the probe carries it to the device. The files have been checked."""
    assert version.adapter_name and version.probe
    mark = time.perf_counter()
    await client.load_adapter(version.adapter_name, adapter)
    mark = timings.since(mark, "load")
    heard = await client.score(version.adapter_name, version.probe["ids"])
    timings.since(mark, "verify")
    distance = apart(heard, version.probe["logprobs"])
    timings.seconds["probe_distance"] = max(distance, timings.seconds.get("probe_distance", 0.0))
    assure(distance, settings)


def apart(heard: Scores, told: Scores) -> float:
    """The largest |engine - trainer|; NaN where the engine computes nonsense."""
    distances = [
        abs(engine - trainer)
        for engine_row, trainer_row in zip(heard, told, strict=True)
        for engine, trainer in zip(engine_row, trainer_row, strict=True)
    ]
    return math.nan if any(map(math.isnan, distances)) else max(distances)


def assure(distance: float, settings: Settings) -> None:
    """Raises NotDelivered."""
    bound = settings.probe_tolerance or TOLERANCE[settings.dtype]
    if not distance <= bound:
        raise NotDelivered(
            f"the engine's log-probs of the probe differ from the trainer's by {distance:.3g} (bound {bound:g})"
        )
