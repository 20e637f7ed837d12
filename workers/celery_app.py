"""The Celery application of the workers. Each task looks for work in the database and does what it finds."""

import sys
from collections.abc import Callable, Coroutine
from typing import Any

from celery import Celery

from app.core.jobs import EXPIRES_SECONDS, TaskName, make_celery
from app.core.settings import get_settings
from workers.context import WorkerContext
from workers.curate import curate
from workers.judging.judge import judge
from workers.reconcile import reconcile
from workers.release.evaluate import evaluate
from workers.release.publish import publish
from workers.release.verify_delivery import preload_torch
from workers.rollouts.sampler import sample_rollouts
from workers.training.assemble import assemble

settings = get_settings()
context = WorkerContext(settings)
celery: Celery = make_celery(settings.broker_url, settings.broker_dir)
celery.conf.beat_schedule = {
    "reconcile": {
        "task": "attune.reconcile",
        "schedule": settings.reconcile_seconds,
        "options": {"expires": EXPIRES_SECONDS},
    }
}
celery.conf.beat_scheduler = "celery.beat:Scheduler"  # the schedule is in code, so nothing is stored
STAGES: dict[TaskName, Callable[[], Coroutine[Any, Any, object]]] = {
    "curate": lambda: curate(context.db, settings),
    "judge": lambda: judge(context.db, settings, context.owner),
    "rollout": lambda: sample_rollouts(context.db, settings, context.owner),
    "assemble": lambda: assemble(context.db, settings),
    "evaluate": lambda: evaluate(context.db, settings, context.owner),
    "publish": lambda: publish(context.db, settings),
    "reconcile": lambda: reconcile(context.db, settings),
}


def add_stage(name: TaskName, stage: Callable[[], Coroutine[Any, Any, object]]) -> None:
    @celery.task(name=f"attune.{name}")
    def run_stage() -> None:
        context.run(stage())


for task, stage in STAGES.items():
    add_stage(task, stage)


class PollingWorker(celery.Worker):
    """Polls Redis in a plain loop instead of Celery's event loop.

    If the connection is lost while a message is acknowledged, the event loop forgets its subscriptions and waits for
    ever. The plain loop subscribes again in every iteration.
    """

    def should_use_eventloop(self) -> bool:
        on_redis = str(settings.broker_url).startswith("redis")
        return not on_redis and bool(super().should_use_eventloop())


celery.Worker = PollingWorker


def run_worker(queues: str, name: str) -> None:
    """Consume these queues, separated by commas, until told to stop. This process runs one task at a time."""
    arguments = ["--pool", "solo", "--queues", queues, "--hostname", f"{name}@%h", "--loglevel", "WARNING"]
    celery.worker_main(["worker", *arguments, "--without-gossip", "--without-mingle", "--without-heartbeat"])


def run_trainer(train: Callable[[], int]) -> None:
    """Call `train` now, for the work that is pending at the start, and then for every message of the train queue."""

    @celery.task(name="attune.train")
    def run_train() -> None:
        train()

    train()
    run_worker("train", "trainer")


def main() -> None:
    """Run the scheduler (`beat`), or a worker that consumes the queues given as arguments, by default all.

    Queues: `attune` (curate, assemble, reconcile), `judge`, `rollout`, `publish` (evaluate, publish).
    """
    if sys.argv[1:] == ["beat"]:
        celery.Beat(loglevel="WARNING").run()
    else:
        if settings.adapter_delivery == "memory":
            preload_torch()
        run_worker(",".join(sys.argv[1:]) or "attune,judge,rollout,publish", "worker")


if __name__ == "__main__":
    main()
