"""Load one version on all engines under its own name, and verify that each computes what the trainer computed."""

import asyncio
import base64
import hashlib
import json
import logging
import math
import pickle
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from alignment.artifacts.manifest import FileEntry, read_manifest
from alignment.artifacts.specs import ADAPTER, ADAPTER_CONFIG
from alignment.errors import DamagedAdapter
from app.core.settings import Settings
from app.engines import fleet
from app.inference.engine import AdapterPayload, EngineClient
from app.inference.pool import EnginePool
from app.inference.transport import EngineRefused, EngineUnavailable
from app.models import Engine, Version
from workers.base_model import check_version

log = logging.getLogger("attune.evaluate")
Scores = Sequence[Sequence[float]]
GRACE_SECONDS = 1.0  # for the slower engines, once enough of them have verified the version
# Largest |engine - trainer| log-prob over the probe that counts as the same weights. Measured in float32: below 1e-5.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}
# In bfloat16 log-probs of the same weights differ by 0.04 (root mean square) and 0.31 at most, which is as much as an
# update moves them. All tokens of the probe together tell the version from its parent: a version is refused if the
# engine is nearer to the parent by this many standard errors.
MIN_STANDARD_ERRORS = 3.0


class NotDelivered(Exception):
    """The engine does not compute what the trainer computed: its weights are not the weights that were trained."""


class EngineUnreachable(EngineUnavailable):
    """The engine did not answer before anything was asked of it, so the version cannot be the cause."""


@dataclass
class Timings:
    """Seconds by phase, measured on one clock."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Record how long the block took, unless it raises."""
        started = time.perf_counter()
        yield
        self.record(phase, time.perf_counter() - started)

    def record(self, name: str, value: float) -> None:
        """Record a value. Of engines that work in parallel the largest counts."""
        self.seconds[name] = max(value, self.seconds.get(name, 0.0))


@dataclass
class VerificationResult:
    """The engines that verified a version, by name; the errors of the others; how many were unreachable from the
    start."""

    verified_engines: list[Engine] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    num_unreachable: int = 0

    @property
    def rejection(self) -> Exception | None:
        """Return the first error that is about the version, not about an engine that cannot be reached."""
        return next((error for error in self.errors if not isinstance(error, EngineUnavailable)), None)


async def verify_on_engines(
    pool: EnginePool, engines: Sequence[Engine], version: Version, settings: Settings, timings: Timings
) -> VerificationResult:
    """Load and verify the version on all engines in parallel.

    Returns when all have answered, or when enough have verified it and the others have had GRACE_SECONDS. The
    reconciler loads it on those later, and no chat is routed to them for this version until then.

    Raises:
        DamagedAdapter: the files are not the ones that were sealed.
    """
    preparation = asyncio.create_task(prepare_adapter(version, settings, timings))

    async def verify(client: EngineClient) -> None:
        await require_reachable(client)
        adapter = await asyncio.shield(preparation)  # nothing is sent before the files are checked
        await load_and_verify(client, version, adapter, settings, timings)

    pending = {asyncio.create_task(verify(pool.get(engine))): engine for engine in engines}
    result, deadline = VerificationResult(), None
    try:
        await preparation
        while pending:
            seconds_left = None if deadline is None else max(0.0, deadline - time.perf_counter())
            finished, _ = await asyncio.wait(pending, timeout=seconds_left, return_when=asyncio.FIRST_COMPLETED)
            if not finished:
                break
            for task in finished:
                _record_result(result, pending.pop(task), task, version)
            if deadline is None and fleet.has_quorum(result.verified_engines, engines):
                deadline = time.perf_counter() + GRACE_SECONDS
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    result.verified_engines.sort(key=lambda engine: engine.name)  # rows are locked in this order everywhere
    return result


def _record_result(result: VerificationResult, engine: Engine, task: asyncio.Task[None], version: Version) -> None:
    error = task.exception()
    if error is None:
        result.verified_engines.append(engine)
        return
    log.warning("%s is not on %s: %s", version.adapter_name, engine.name, error)
    result.num_unreachable += isinstance(error, EngineUnreachable)
    if isinstance(error, Exception):
        expected = isinstance(error, EngineUnavailable | EngineRefused | NotDelivered)
        result.errors.append(error if expected else EngineRefused(0, f"its answer was not understood: {error!r}"))


def check_files(version: Version, settings: Settings) -> None:
    """Raise DamagedAdapter if the version's files are not the ones that were sealed."""
    assert version.adapter_path and version.manifest_sha256
    directory = Path(version.adapter_path)
    check_version(settings, directory, version.manifest_sha256, full_weights=version.full_weights)


async def prepare_adapter(version: Version, settings: Settings, timings: Timings) -> Path | AdapterPayload:
    """Check the files and return what the engine is given: the directory, or the payload built from it.

    Raises:
        DamagedAdapter: the files are not the ones that were sealed.
        OSError: the storage cannot be read.
    """
    assert version.adapter_path and version.manifest_sha256
    directory = Path(version.adapter_path)
    with timings.measure("check"):
        await asyncio.to_thread(check_files, version, settings)
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
    """Return an adapter as SGLang takes it within the load call, instead of a path on shared storage.

    The payload is pickled tensors, which SGLang unpickles with an allow-list of its own. Nothing in it refers to this
    machine's memory, so the engine may run on another machine. SGLang dies of a payload that it cannot unpickle, so a
    payload is built only from the bytes that were sealed.

    Raises:
        DamagedAdapter: the files changed since the directory was checked.
    """
    from safetensors.torch import load

    files, _ = read_manifest(directory, manifest_sha256)
    config, tensors = (_read_sealed(directory, name, files) for name in (ADAPTER_CONFIG, ADAPTER))
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


def require_delivered(engine_scores: Scores, version: Version, settings: Settings, timings: Timings) -> None:
    """Raise NotDelivered unless these are the version's log-probs, and nearer to them than to its parent's.

    In bfloat16 the tolerance alone would accept the parent under the version's name. An update that moved the probe
    too little to tell is accepted with a warning.
    """
    assert version.probe is not None
    require_equal_scores(engine_scores, version.probe["logprobs"], settings, timings)
    if (parent_scores := version.probe.get("parent_logprobs")) is None:
        return  # exported before these were recorded, or the base model's
    position = position_from_parent(engine_scores, version.probe["logprobs"], parent_scores)
    if position is None:
        log.warning("%s: its update did not change the probe", version.adapter_name)
        return
    share, error = position
    timings.record("probe_share", share)
    timings.record("probe_share_error", error)
    if abs(share - 0.5) <= MIN_STANDARD_ERRORS * error:
        log.warning(
            "%s: its update moved the probe too little to tell its delivery from its parent's (%.2f ± %.2f of the way)",
            version.adapter_name,
            share,
            error,
        )
    elif not share > 0.5:
        raise NotDelivered(
            "the engine's log-probs of the probe are nearer to the parent's than to the version's: they moved by "
            f"{share:.2f} ± {error:.2f} of the way"
        )


def position_from_parent(
    engine_scores: Scores, trainer_scores: Scores, parent_scores: Scores
) -> tuple[float, float] | None:
    """Return the engine's share of the way from the parent to the version, and the share's standard error.

    The share is the projection of engine - parent on version - parent over all tokens: near 0 for the parent's weights
    and near 1 for the version's. Rounding moves both towards the middle by the same amount, so that 0.5 separates them.
    Returns None if the update changed no log-prob.
    """
    rows = zip(engine_scores, trainer_scores, parent_scores, strict=True)
    triples = [scores for row in rows for scores in zip(*row, strict=True)]
    moves = [(engine - parent, own - parent) for engine, own, parent in triples]
    length = sum(own * own for _, own in moves)
    if not length:
        return None
    share = sum(engine * own for engine, own in moves) / length
    residuals = [(engine - share * own, own) for engine, own in moves]
    # The noise may be the same at all tokens, or grow with the move: the larger error counts.
    even = math.sqrt(sum(rest * rest for rest, _ in residuals) / max(1, len(moves) - 1) / length)
    uneven = math.sqrt(sum((rest * own) ** 2 for rest, own in residuals)) / length
    return share, max(even, uneven)


def max_logprob_difference(engine_scores: Scores, trainer_scores: Scores) -> float:
    """Return the largest |engine - trainer|, or NaN if any value is NaN."""
    differences = [
        abs(engine - trainer)
        for engine_row, trainer_row in zip(engine_scores, trainer_scores, strict=True)
        for engine, trainer in zip(engine_row, trainer_row, strict=True)
    ]
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def require_equal_scores(
    engine_scores: Scores, trainer_scores: Scores, settings: Settings, timings: Timings | None = None
) -> None:
    """Raise NotDelivered if log-probs of the probe differ by more than the tolerance, or by NaN."""
    difference = max_logprob_difference(engine_scores, trainer_scores)
    if timings is not None:
        timings.record("probe_distance", difference)
    bound = probe_tolerance(settings)
    if not difference <= bound:
        raise NotDelivered(
            f"the engine's log-probs of the probe differ from the trainer's by {difference:.3g} (bound {bound:g})"
        )


def probe_tolerance(settings: Settings) -> float:
    """Return the largest |engine - trainer| log-prob, in nats, that counts as the same weights."""
    return settings.release.probe_tolerance or TOLERANCE[settings.dtype]


async def require_reachable(client: EngineClient) -> None:
    """Raise EngineUnreachable if the engine does not answer twice: one missed answer does not count."""
    if not await client.is_ready() and not await client.is_ready():
        raise EngineUnreachable(f"{client.url} does not answer")
