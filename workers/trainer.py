"""Entry point of one trainer rank under torchrun: rank 0 consumes Celery messages, the others follow its commands."""

import argparse
import logging
import signal
from pathlib import Path

from alignment.models.parallel import exit_process
from app.core.process_metrics import PoolMetrics, serve_metrics
from app.core.processes import die_with_parent
from app.core.request_log import configure_logging
from app.core.settings import get_settings
from workers.context import WorkerContext
from workers.parity import ParityCheck
from workers.stage_metrics import TRAINER_METRICS, measure_stage, prepare_stage
from workers.training.loop import TrainingLoop
from workers.training.ranks import RANK_TIMEOUT_SECONDS, RankGroup, RankGroupFailed, abort_rank
from workers.training.trackers import Trackers
from workers.training.watchdog import RankHeartbeat

log = logging.getLogger("attune.trainer")


def run_rank_zero(group: RankGroup) -> None:
    """Consume messages until told to stop, then stop the other ranks."""
    from workers.celery_app import run_trainer  # Celery is loaded on rank 0 only

    context = WorkerContext()
    trackers = Trackers(context.settings)
    loop, parity = TrainingLoop(group, context, trackers), ParityCheck(group, context)

    def train() -> int:
        try:
            with measure_stage("train"):
                return loop.run_pending_work() if parity.allows_training() else 0
        except RankGroupFailed:  # Celery would log it and continue
            abort_rank()

    prepare_stage("train")
    pool = PoolMetrics(lambda: context.db.num_connections_in_use)
    serve_metrics(context.settings, "trainer", pool, *TRAINER_METRICS)
    log.info("trainer ready: %d rank(s)", group.trainer.num_ranks)
    run_trainer(train)
    group.broadcast(None)
    trackers.close()


def main() -> None:
    die_with_parent(signal.SIGKILL)  # torchrun gives each rank a session, which no signal to its own group reaches
    configure_logging(get_settings().observability.log_format, "trainer", "INFO")
    parser = argparse.ArgumentParser(description="Run one rank of a trainer.")
    parser.add_argument("--rank-timeout", type=float, default=RANK_TIMEOUT_SECONDS)
    parser.add_argument("--heartbeat-dir", type=Path, help="the directory of the ranks' heartbeat files")
    arguments = parser.parse_args()
    if arguments.heartbeat_dir:
        RankHeartbeat(arguments.heartbeat_dir, arguments.rank_timeout)
    try:
        group = RankGroup(get_settings(), arguments.rank_timeout)
        if group.trainer.rank == 0:
            run_rank_zero(group)
        else:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun signals all ranks; rank 0 ends the group
            group.follow()
    except Exception:
        abort_rank()
    exit_process()


if __name__ == "__main__":
    main()
