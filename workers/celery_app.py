"""The Celery shell: doorbells. Each task looks at the database and does what it finds there."""

import sys
from collections.abc import Callable

from celery import Celery

from app.core.jobs import EXPIRES_SECONDS, make_celery
from app.core.settings import get_settings
from workers.context import WorkerContext
from workers.engine.adapter_payload import prepare
from workers.feedback.curate import curate
from workers.judging.judge import judge
from workers.reconcile import reconcile
from workers.release.evaluate import evaluate
from workers.release.publish import publish
from workers.rollouts.sample import roll_out
from workers.training.assemble import assemble

settings = get_settings()
house = WorkerContext(settings)
celery: Celery = make_celery(settings.broker_url, settings.broker_dir)
celery.conf.beat_schedule = {
    "reconcile": {
        "task": "attune.reconcile",
        "schedule": settings.reconcile_seconds,
        "options": {"expires": EXPIRES_SECONDS},
    }
}
celery.conf.beat_scheduler = "celery.beat:Scheduler"  # the schedule is in code: nothing to persist


@celery.task(name="attune.curate")
def run_curate() -> None:
    house.run(curate(house.db, settings))


@celery.task(name="attune.judge")
def run_judge() -> None:
    house.run(judge(house.db, settings, house.owner))


@celery.task(name="attune.rollout")
def run_rollout() -> None:
    house.run(roll_out(house.db, settings, house.owner))


@celery.task(name="attune.assemble")
def run_assemble() -> None:
    house.run(assemble(house.db, settings))


@celery.task(name="attune.evaluate")
def run_evaluate() -> None:
    house.run(evaluate(house.db, settings, house.owner))


@celery.task(name="attune.publish")
def run_publish() -> None:
    house.run(publish(house.db, settings))


@celery.task(name="attune.reconcile")
def run_reconcile() -> None:
    house.run(reconcile(house.db, settings))


class Listener(celery.Worker):
    """Waits for Redis in a plain loop. Celery's event loop forgets what it polled when a connection is lost while a
    message is acknowledged, and then waits for nothing, for ever; the plain one subscribes anew at every turn."""

    def should_use_eventloop(self) -> bool:
        on_redis = str(settings.broker_url).startswith("redis")
        return not on_redis and bool(super().should_use_eventloop())


celery.Worker = Listener


def serve(queue: str, name: str) -> None:
    """Answer one queue until told to stop. One process, one loop: a station is never run twice at once here."""
    arguments = ["--pool", "solo", "--queues", queue, "--hostname", f"{name}@%h", "--loglevel", "WARNING"]
    celery.worker_main(["worker", *arguments, "--without-gossip", "--without-mingle", "--without-heartbeat"])


def serve_trainer(work: Callable[[], int]) -> None:
    @celery.task(name="attune.train")
    def run_train() -> None:
        work()

    work()  # what was left over from before this start
    serve("train", "trainer")


def main() -> None:
    """`beat`, or the queues to answer: `attune` (curate, assemble, sweep), `judge`, `rollout`, `publish` (evaluate,
    publish)."""
    if sys.argv[1:] == ["beat"]:
        celery.Beat(loglevel="WARNING").run()
    else:
        if settings.adapter_delivery == "memory":
            prepare()
        serve(",".join(sys.argv[1:]) or "attune,judge,rollout,publish", "worker")


if __name__ == "__main__":
    main()
