"""Batch → Version. Runs under torchrun: rank 0 answers Celery and claims batches, every rank runs the update."""

import asyncio
import logging
import math
import signal
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from alignment.config import LoRAConfig, OptimConfig, TrainerConfig
from alignment.errors import AlignmentError
from alignment.model.shard import leave
from alignment.samples import Batch
from alignment.trainer.learner import Learner
from app.cli.processes import die_with_parent
from app.config import Settings
from app.db import Database
from app.models import Batch as BatchRow
from app.models import lease
from workers import base_model, batches
from workers.house import House
from workers.trackers import Trackers

log = logging.getLogger("attune.trainer")


def trainer_config(settings: Settings) -> TrainerConfig:
    """The deployment's recipe: its general settings hold where the algorithm's own name none."""
    algorithm = settings.algorithm
    general: dict[str, Any] = {} if settings.kl_coef is None else {"kl_coef": settings.kl_coef}
    if settings.length_range:
        general |= dict(zip(("shortest", "longest"), settings.length_range, strict=True))
    fields = type(algorithm).model_fields.keys() - algorithm.model_fields_set
    algorithm = algorithm.model_copy(update={name: value for name, value in general.items() if name in fields})
    return TrainerConfig(
        algorithm=algorithm,
        lora=LoRAConfig(),
        optim=OptimConfig(lr=settings.learning_rate),
        seed=settings.seed,
        dtype=settings.dtype,
    )


class Group:
    """The ranks that live on together. Rank 0 says what to do next; the others wait for it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.learner = Learner(base_model.folder(settings.model), trainer_config(settings))
        # Ranks other than 0 wait here for as long as no batch comes; the default time-out is half an hour.
        self._orders = (
            dist.new_group(backend="gloo", timeout=timedelta(days=365)) if self.learner.num_ranks > 1 else None
        )
        self.at: Path | str | None = "nowhere"  # the version directory the learner stands on; None is version 0

    @property
    def leads(self) -> bool:
        return self.learner.rank == 0

    def tell(self, order: dict[str, Any] | None) -> dict[str, Any] | None:
        """From rank 0 to all. None means: stop."""
        box = [order]
        if self._orders is not None:
            dist.broadcast_object_list(box, src=0, group=self._orders)
        return box[0]

    def follow(self) -> None:
        """Ranks other than 0: do as told until told to stop."""
        while (order := self.tell(None)) is not None:
            with suppress(AlignmentError):  # every rank refuses alike; rank 0 puts it on record
                self.update(order)

    def update(self, order: dict[str, Any]) -> dict[str, Any]:
        """One update on every rank, from the parent's state to a new version's directory."""
        parent = Path(order["parent"]) if order["parent"] else None
        started = time.perf_counter()
        if self.at != parent:
            self.at = "nowhere"
            self.learner.restore(parent)
            self.at = parent
        restored = time.perf_counter()
        self.at = "nowhere"  # until the new version is written, what stands in memory has no name
        batch = Batch.from_bytes(order["batch"])
        report = self.learner.update(batch)
        updated = time.perf_counter()
        probe = self.learner.probe()
        exporting = time.perf_counter()
        export = self.learner.export(Path(order["directory"]), order["lineage"])
        self.at = Path(order["directory"])
        return {
            "path": export.path,
            "manifest_sha256": export.manifest_sha256,
            "probe": {"ids": probe.ids, "logprobs": probe.logprobs},
            "metrics": report.metrics,
            "timings": {
                "restore": restored - started,
                "update": updated - restored,
                "export": time.perf_counter() - exporting,
            },
        }


def work(group: Group, house: House, trackers: Trackers) -> int:
    """Rank 0: train every batch that is open. Returns how many were taken."""
    taken = 0
    while (claimed := house.run(batches.claim(house.db, house.owner, house.settings))) is not None:
        taken += 1
        train(group, house, claimed, trackers)
    return taken


def train(group: Group, house: House, claimed: batches.Claimed, trackers: Trackers) -> None:
    log.info("batch %s: %d samples → %s", claimed.batch.id, len(claimed.batch.samples), claimed.adapter_name)
    order = {
        "parent": claimed.parent_path,
        "batch": claimed.batch.to_bytes(),
        "directory": str(claimed.directory(house.settings)),
        "lineage": {
            "version": claimed.adapter_name,
            "parent": claimed.parent_id,
            "batch": claimed.batch.id,
            "base_model": house.settings.model,
        },
    }
    with Heartbeat(house.settings, claimed):
        try:
            group.tell(order)
            result = group.update(order)
        except AlignmentError as refusal:
            house.run(batches.quarantine(house.db, claimed, f"{type(refusal).__name__}: {refusal}"))
            log.warning("batch %s: %s", claimed.batch.id, refusal)
            return
    result["path"] = Path(result["path"])
    try:
        finite = {name: value for name, value in result["metrics"].items() if math.isfinite(value)}
        kept = house.run(batches.commit(house.db, claimed, **(result | {"metrics": finite})))
    except lease.LeaseLost as late:
        log.warning("%s; %s is thrown away", late, claimed.adapter_name)
        group.at = "nowhere"
        return
    log.info("%s %s", claimed.adapter_name, "trained" if kept else "is void: the head moved")
    if kept:
        name, number = claimed.adapter_name, claimed.number
        trackers.log(claimed.policy_name, name, number, claimed.batch.id, result["metrics"])


class Heartbeat:
    """Pushes the lease out from a thread and a connection of its own while the update runs."""

    def __init__(self, settings: Settings, claimed: batches.Claimed) -> None:
        self._settings, self._claimed = settings, claimed
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        if self._stop.wait(self._settings.lease_seconds / 4):
            return  # most updates are over before the first beat is due
        with asyncio.Runner() as runner:
            db = Database(self._settings.database)
            while not self._stop.wait(self._settings.lease_seconds / 4):
                runner.run(self._beat(db))
            runner.run(db.close())

    async def _beat(self, db: Database) -> None:
        async with db.write() as session:
            await lease.beat(
                session,
                BatchRow,
                self._claimed.batch.id,
                fence=self._claimed.fence,
                seconds=self._settings.lease_seconds,
            )


def main() -> None:
    die_with_parent(signal.SIGKILL)  # torchrun gives each rank a session, which no signal to its own group reaches
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    house = House()
    group = Group(house.settings)
    if group.leads:
        from workers.celery import serve_trainer  # Celery belongs to rank 0 alone

        trackers = Trackers(house.settings)
        log.info("trainer ready: %d rank(s)", group.learner.num_ranks)
        serve_trainer(lambda: work(group, house, trackers))
        group.tell(None)
        trackers.close()
    else:
        group.follow()
    leave()


if __name__ == "__main__":
    main()
