"""The training loop of rank 0: claim batches, train each on all ranks, and record the new versions.

Between batches it runs the reward model jobs: see `workers.training.reward_model_jobs`. `workers.trainer` starts it.
"""

import logging
import math
from contextlib import suppress
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from alignment.errors import AlignmentError, DamagedAdapter
from app.core import leases
from app.models import Batch as BatchRow
from workers.context import WorkerContext
from workers.queue.heartbeat import Heartbeat
from workers.training import batches
from workers.training.ranks import UNKNOWN, RankGroup, RankGroupFailed
from workers.training.reward_model_jobs import run_next_jobs
from workers.training.trackers import Trackers

log = logging.getLogger("attune.trainer")


def run_pending_work(group: RankGroup, context: WorkerContext, trackers: Trackers) -> int:
    """Train every open batch, and run the reward model jobs between them. Return how many jobs were run.

    Raises:
        RankGroupFailed: a rank failed.
    """

    def train_open_batches() -> int:
        count = 0
        while (claimed := context.run(batches.claim(context.db, context.owner, context.settings))) is not None:
            train_batch(group, context, claimed, trackers)
            count += 1
        return count

    num_jobs = train_open_batches()
    while run_next_jobs(group, context, train_open_batches):
        num_jobs += 1 + train_open_batches()
    return num_jobs


def train_batch(group: RankGroup, context: WorkerContext, claimed: batches.ClaimedBatch, trackers: Trackers) -> None:
    """Run one update and record the version, or why there is none. Raise RankGroupFailed if a rank failed."""
    batch_id = claimed.batch.id
    log.info("batch %s: %d samples → %s", batch_id, len(claimed.batch.samples), claimed.adapter_name)
    command = {
        "action": "update",
        "parent": claimed.parent_path,
        "batch": claimed.batch.to_bytes(),
        "directory": str(claimed.directory(context.settings)),
        "lineage": {
            "version": claimed.adapter_name,
            "parent": claimed.parent_id,
            "batch": batch_id,
            "base_model": context.settings.model,
        },
    }
    with Heartbeat(context.settings, BatchRow, {batch_id: claimed.fence}):
        try:
            result = group.run(command)
        except DamagedAdapter as error:
            context.run(batches.halt_on_damaged_parent(context.db, claimed, str(error)))
            log.error("batch %s: training of %s is halted: %s", batch_id, claimed.policy_name, error)
            return
        except AlignmentError as error:
            context.run(batches.quarantine(context.db, claimed, f"{type(error).__name__}: {error}"))
            log.warning("batch %s: %s", batch_id, error)
            return
        except RankGroupFailed as error:
            with suppress(SQLAlchemyError):  # not needed for a retry: the lease expires without it
                context.run(batches.record_failed_attempt(context.db, claimed, str(error)))
            raise
    result["directory"] = Path(result["directory"])
    finite_metrics = {name: value for name, value in result["metrics"].items() if math.isfinite(value)}
    try:
        is_committed = context.run(batches.commit(context.db, claimed, **(result | {"metrics": finite_metrics})))
    except leases.LeaseLost as error:
        log.warning("%s; %s is thrown away", error, claimed.adapter_name)
        group.loaded_version_dir = UNKNOWN
        return
    log.info("%s %s", claimed.adapter_name, "trained" if is_committed else "is void: the head moved")
    if is_committed:
        name, number = claimed.adapter_name, claimed.number
        trackers.log(claimed.policy_name, name, number, batch_id, result["metrics"])
