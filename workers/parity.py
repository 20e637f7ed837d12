"""The parity check: before the first update, engine and trainer must compute the same log-probs from the base model.

They are two implementations of one architecture. Where they differ, the log-probs that are recorded with a reply are
not those of the model that is trained, and nothing else would show it. Compared are random tokens without an adapter,
and with a random one.
"""

import asyncio
import logging
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from alignment.artifacts.specs import ADAPTER, ADAPTER_CONFIG
from alignment.trainer.base_probe import BaseProbe
from app.core.settings import Settings
from app.engines.adaptation import adaptation_of
from app.engines.fleet import list_ready_engines
from app.inference.engine import AdapterPayload, EngineClient
from app.inference.keys import load_engine_keys
from app.inference.pool import EnginePool
from app.inference.transport import EngineRefused, EngineUnavailable
from app.models import Engine
from app.training.base_parity import ParityRecord, write_parity
from workers.context import WorkerContext
from workers.release.delivery.adapters import pack_adapter
from workers.release.verify_delivery import max_logprob_difference, probe_tolerance
from workers.training.commands import ProbeBaseModel
from workers.training.ranks import UNKNOWN, RankGroup

log = logging.getLogger("attune.trainer")
RETRY_SECONDS = 10.0  # after an engine did not answer
MAX_FAILURES = 2  # of an engine at the random adapter; an engine that crashes at it must not be restarted for ever


@dataclass
class ParityCheck:
    """The check of one trainer process. It runs when an engine is ready, until it has passed."""

    group: RankGroup
    context: WorkerContext
    has_passed: bool = field(default=False, init=False)
    failures: int = field(default=0, init=False)
    reason: str | None = field(default=None, init=False)
    due_at: float = field(default=-math.inf, init=False)  # time.monotonic()

    def allows_training(self) -> bool:
        """Run the check if it is due. Return False if the base model is refused.

        Without a ready engine, or when one does not answer, it is left for later: a version is compared with the engine
        before it serves anyway.
        """
        settings = self.context.settings
        keeps_base_model = adaptation_of(settings).keeps_base_model
        if self.has_passed or not settings.trainer.parity_check or not keeps_base_model:
            return True
        if self.failures >= MAX_FAILURES:
            return False
        if time.monotonic() < self.due_at or not (engines := self.context.run(_ready_engines(self.context))):
            return True
        directory = settings.home / "parity" / uuid4().hex
        self.group.loaded_version_dir = UNKNOWN
        try:
            probe = self.group.run(ProbeBaseModel(directory))
            record = self.context.run(compare_with_engines(settings, engines, probe))
        except EngineUnavailable as error:
            log.warning("the parity check is left for later: %s", error)
            self.due_at = time.monotonic() + RETRY_SECONDS
            return True
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        self.has_passed = record.reason is None
        self.failures += record.has_engine_failed
        if record.reason != self.reason:
            log.error("training is refused: %s", record.reason)
        self.reason = record.reason
        write_parity(settings, record)
        return self.has_passed


async def _ready_engines(context: WorkerContext) -> list[Engine]:
    async with context.db.read() as session:
        return await list_ready_engines(session)


async def compare_with_engines(settings: Settings, engines: Sequence[Engine], probe: BaseProbe) -> ParityRecord:
    """Return the first refusal of the engines, or else the record of the largest differences."""
    adapter = await asyncio.to_thread(prepare_random_adapter, settings, probe.directory)
    async with EnginePool(load_engine_keys(settings)) as pool:
        clients = [pool.get(engine) for engine in engines]
        records = await asyncio.gather(*(compare_with_engine(settings, client, probe, adapter) for client in clients))
    return max(records, key=lambda record: (record.reason is not None, record.base, record.adapter))


def prepare_random_adapter(settings: Settings, directory: Path) -> Path | AdapterPayload:
    """Return what the engines are given, as with a version: the directory, or the payload built from it."""
    if settings.engine.adapter_delivery == "path":
        return directory
    return pack_adapter((directory / ADAPTER_CONFIG).read_bytes(), (directory / ADAPTER).read_bytes())


async def compare_with_engine(
    settings: Settings, client: EngineClient, probe: BaseProbe, random_adapter: Path | AdapterPayload
) -> ParityRecord:
    """Compare one engine's log-probs of the probe with the trainer's. The random adapter is unloaded afterwards.

    Raises EngineUnavailable, but not where the engine ends or hangs while it loads or uses the adapter: that is a
    refusal.
    """
    bound, name = probe_tolerance(settings), f"parity-{probe.directory.name}"
    base = adapter = 0.0
    try:
        base = max_logprob_difference(await client.score(None, probe.ids), probe.base_logprobs)
        if not base <= bound:
            reason = f"without an adapter the engine's log-probs differ from the trainer's by {base:.2g}"
            return ParityRecord(_refusal(settings, f"{reason} (bound {bound:g})"), base, adapter)
        try:
            await client.load_adapter(name, random_adapter)
            adapter = max_logprob_difference(await client.score(name, probe.ids), probe.adapter_logprobs)
        except (EngineRefused, EngineUnavailable) as error:
            if isinstance(error, EngineUnavailable) and await client.is_ready():
                raise  # it was slow, and has not ended
            return ParityRecord(_refusal(settings, f"the engine fails at a random adapter: {error}"), base, 0.0, True)
        await client.unload_adapter(name)
    except EngineRefused as error:
        return ParityRecord(_refusal(settings, f"the engine refuses the probe: {error}"), base, adapter)
    if not adapter <= bound:
        reason = f"with a random adapter the engine's log-probs differ from the trainer's by {adapter:.2g}"
        return ParityRecord(_refusal(settings, f"{reason} (bound {bound:g})"), base, adapter)
    return ParityRecord(None, base, adapter)


def _refusal(settings: Settings, reason: str) -> str:
    return f"the base model {settings.model} cannot be trained: {reason}. See docs/models.md"
