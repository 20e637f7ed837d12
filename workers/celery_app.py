"""The Celery application of the workers. Each task looks for work in the database and does what it finds."""

import sys
from collections.abc import Callable, Coroutine
from typing import Any

from celery import Celery
from celery.signals import setup_logging, worker_shutting_down

from app.core.jobs import EXPIRES_SECONDS, TaskName, consumed_queues, make_celery, queue_name
from app.core.process_metrics import PoolMetrics, serve_metrics
from app.core.request_log import configure_logging
from app.core.settings import get_settings
from workers.context import WorkerContext
from workers.curate import curate
from workers.database_metrics import DatabaseMetrics
from workers.judging.judge import judge
from workers.queue.leased_job import is_stopping
from workers.reconcile import reconcile
from workers.release.delivery.adapters import preload_torch
from workers.release.evaluate import evaluate
from workers.release.publish import publish
from workers.rollouts.sampler import sample_rollouts
from workers.stage_metrics import measure_stage, worker_metrics
from workers.training.assemble import assemble
from workers.webhooks import send_webhooks

settings = get_settings()
context = WorkerContext(settings)
celery: Celery = make_celery(settings.broker.url, settings.broker_dir)
celery.conf.beat_schedule = {
    "reconcile": {
        "task": "attune.reconcile",
        "schedule": settings.workers.reconcile_seconds,
        "options": {"expires": EXPIRES_SECONDS, "queue": queue_name("reconcile")},
    }
}
celery.conf.beat_scheduler = "celery.beat:Scheduler"  # the schedule is in code, so nothing is stored
STAGES: dict[TaskName, Callable[[], Coroutine[Any, Any, object]]] = {
    "curate": lambda: curate(context.db, settings),
    "judge": lambda: judge(context.db, settings, context.owner),
    "rollout": lambda: sample_rollouts(context.db, settings, context.owner),
    "webhook": lambda: send_webhooks(context.db, settings, context.owner),
    "assemble": lambda: assemble(context.db, settings),
    "evaluate": lambda: evaluate(context.db, settings, context.owner),
    "publish": lambda: publish(context.db, settings),
    "reconcile": lambda: reconcile(context.db, settings),
}


def add_stage(name: TaskName, stage: Callable[[], Coroutine[object, object, object]]) -> None:
    def run_stage() -> None:
        with measure_stage(name):
            context.run(stage())

    celery.task(run_stage, name=f"attune.{name}")


for task, stage in STAGES.items():
    add_stage(task, stage)


class PollingWorker(celery.Worker):  # type: ignore[misc]  # Celery has no types
    """Polls Redis in a plain loop instead of Celery's event loop.

    If the connection is lost while a message is acknowledged, the event loop forgets its subscriptions and waits for
    ever. The plain loop subscribes again in every iteration.
    """

    def should_use_eventloop(self) -> bool:
        on_redis = str(settings.broker.url).startswith("redis")
        return not on_redis and bool(super().should_use_eventloop())


celery.Worker = PollingWorker
setup_logging.connect(lambda **_: None, weak=False)  # the processes configure it; Celery leaves it alone
worker_shutting_down.connect(lambda **_: is_stopping.set(), weak=False)


def run_worker(queues: str, name: str) -> None:
    """Consume these queues, separated by commas, until told to stop. This process runs one task at a time."""
    arguments = ["--pool", "solo", "--queues", queues, "--hostname", f"{name}@%h", "--loglevel", "WARNING"]
    celery.worker_main(["worker", *arguments, "--without-gossip", "--without-mingle", "--without-heartbeat"])


def run_trainer(train: Callable[[], int]) -> None:
    """Call `train` now, for the work that is pending at the start, and then for every message of the train queue."""

    def run_train() -> None:
        train()

    celery.task(run_train, name="attune.train")
    train()
    run_worker("train", "trainer")


def main() -> None:
    """Run the scheduler (`beat`), or a worker that consumes the queues given as arguments, by default all.

    Queues: `attune` (reconcile, and with it curate and assemble), `judge` (and with it webhook), `rollout`, `publish`
    (evaluate, publish).
    """
    if sys.argv[1:] == ["beat"]:
        configure_logging(settings.observability.log_format, "beat")
        serve_metrics(settings, "beat", DatabaseMetrics(settings))
        celery.Beat(loglevel="WARNING").run()
    else:
        if settings.engine.adapter_delivery == "memory":
            preload_torch()
        queues = consumed_queues(sys.argv[1:] or ["attune", "judge", "rollout", "publish"])
        configure_logging(settings.observability.log_format, "worker")
        pool = PoolMetrics(lambda: context.db.num_connections_in_use)
        serve_metrics(settings, "worker", pool, *worker_metrics(queues, STAGES))
        run_worker(",".join(queues), "worker")


if __name__ == "__main__":
    main()
