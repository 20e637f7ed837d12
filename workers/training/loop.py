"""Batch → Version. Runs under torchrun: rank 0 answers Celery and claims batches, every rank runs the update.

Between batches it does what reward models have to do: see `workers.training.reward_model_jobs`.
"""

import argparse
import logging
import math
import signal
from contextlib import suppress
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from alignment.errors import AlignmentError, DamagedAdapter
from alignment.models.parallel import leave
from app.cli.processes import die_with_parent
from app.core import leases
from app.core.database import Database
from app.core.settings import Settings
from app.models import Batch as BatchRow
from app.models import Policy, record_audit
from workers.context import WorkerContext
from workers.queue.heartbeat import Heartbeat
from workers.training import batches
from workers.training.ranks import PATIENCE_SECONDS, Broken, Group, part
from workers.training.reward_model_jobs import teach
from workers.training.trackers import Trackers
from workers.training.watchdog import Pulse

log = logging.getLogger("attune.trainer")


def work(group: Group, house: WorkerContext, trackers: Trackers) -> int:
    """Rank 0: train every batch that is open, and between them what reward models have to do. Returns how many pieces
    of work were taken. Raises Broken."""

    def trained() -> int:
        count = 0
        while (claimed := house.run(batches.claim(house.db, house.owner, house.settings))) is not None:
            train(group, house, claimed, trackers)
            count += 1
        return count

    taken = trained()
    while teach(group, house, trained):
        taken += 1 + trained()
    return taken


def train(group: Group, house: WorkerContext, claimed: batches.Claimed, trackers: Trackers) -> None:
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
    with Heartbeat(house.settings, BatchRow, {claimed.batch.id: claimed.fence}):
        try:
            result = group.lead(order)
        except DamagedAdapter as damage:
            house.run(batches.parent_damaged(house.db, claimed, str(damage)))
            log.error("batch %s: learning of %s is halted: %s", claimed.batch.id, claimed.policy_name, damage)
            return
        except AlignmentError as refusal:
            house.run(batches.quarantine(house.db, claimed, f"{type(refusal).__name__}: {refusal}"))
            log.warning("batch %s: %s", claimed.batch.id, refusal)
            return
        except Broken as reason:
            with suppress(SQLAlchemyError):  # the lease runs out just as well without it
                house.run(note_failure(house.db, claimed, str(reason)))
            raise
    result["path"] = Path(result["path"])
    try:
        finite = {name: value for name, value in result["metrics"].items() if math.isfinite(value)}
        kept = house.run(batches.commit(house.db, claimed, **(result | {"metrics": finite})))
    except leases.LeaseLost as late:
        log.warning("%s; %s is thrown away", late, claimed.adapter_name)
        group.at = "nowhere"
        return
    log.info("%s %s", claimed.adapter_name, "trained" if kept else "is void: the head moved")
    if kept:
        name, number = claimed.adapter_name, claimed.number
        trackers.log(claimed.policy_name, name, number, claimed.batch.id, result["metrics"])


async def note_failure(db: Database, claimed: batches.Claimed, reason: str) -> None:
    """The batch stays as it is, leased; people see why it will be taken again."""
    async with db.write() as session:
        policy = await session.get_one(Policy, claimed.policy_id)
        told = {"attempt": claimed.attempt}
        record_audit(
            session, "trainer", "attempt failed", claimed.batch.id, reason, project_id=policy.project_id, **told
        )


def serve(group: Group) -> None:
    """Rank 0, until it is told to stop."""
    from workers.celery_app import serve_trainer  # Celery belongs to rank 0 alone

    house = WorkerContext()
    trackers = Trackers(house.settings)

    def answer() -> int:
        try:
            return work(group, house, trackers)
        except Broken:  # Celery would put it in its log and go on
            part()

    log.info("trainer ready: %d rank(s)", group.learner.num_ranks)
    serve_trainer(answer)
    group.tell(None)
    trackers.close()


def main() -> None:
    die_with_parent(signal.SIGKILL)  # torchrun gives each rank a session, which no signal to its own group reaches
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    told = argparse.ArgumentParser()
    told.add_argument("--patience", type=float, default=PATIENCE_SECONDS)
    told.add_argument("--pulse", type=Path, help="the folder where ranks show that they live")
    arguments = told.parse_args()
    if arguments.pulse:
        Pulse(arguments.pulse, arguments.patience)
    try:
        group = Group(Settings(), arguments.patience)
        if group.leads:
            serve(group)
        else:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun tells all; rank 0 ends its update, then the group
            group.follow()
    except Exception:
        part()
    leave()


if __name__ == "__main__":
    main()
