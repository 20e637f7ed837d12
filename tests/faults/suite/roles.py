"""The main function of each process kind, and the switches of the faults that are injected inside a process."""

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from typing import Any


def run(kind: str) -> None:
    set_switches()
    ROLES[kind]()


def api() -> None:
    from app.cli.server import serve

    serve()


def worker(*queues: str) -> None:
    from workers import celery_app

    sys.argv = ["celery", *queues]
    celery_app.main()


def trainer() -> None:
    """Run rank 0 without torchrun and with a fake Trainer; claims, heartbeats, exports and commits are real."""
    from tests.faults.suite.fake_trainer import FakeTrainer
    from workers import trainer as real
    from workers.training import ranks

    ranks.Trainer = FakeTrainer  # type: ignore[assignment, attr-defined]
    os.environ["ATTUNE_TRAINER__PARITY_CHECK"] = "false"  # there is no base model that a fake trainer could score
    sys.argv = ["trainer"]
    real.main()


def engine() -> None:
    from app.core.settings import get_settings
    from workers.engine import __main__ as real

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    asyncio.run(real.run(get_settings()))


ROLES: dict[str, Callable[[], None]] = {
    "api": api,
    "worker": lambda: worker("attune"),
    "judge": lambda: worker("judge"),
    "rollout": lambda: worker("rollout"),
    "publisher": lambda: worker("publish"),
    "trainer": trainer,
    "trainer-2": trainer,
    "beat": lambda: worker("beat"),
    "engine": engine,
}


def set_switches() -> None:
    """Apply the switches in the environment.

    FAULTS_MESSAGES: `none`, `reconcile` (only the reconciler's messages are sent) or `3` (every message is sent three
    times). FAULTS_SKEW: the error of this process's wall clock in seconds. FAULTS_RETRY_SPEEDUP: the factor by which
    the pauses between attempts to reach the broker are shortened.
    """
    delivery = os.environ.get("FAULTS_MESSAGES", "")
    if delivery in ("none", "reconcile"):
        drop_messages(keep_reconciler=delivery == "reconcile")
    elif delivery:
        repeat_messages(int(delivery))
    if speedup := float(os.environ.get("FAULTS_RETRY_SPEEDUP", "0")):
        shorten_retries(speedup)
    if skew := float(os.environ.get("FAULTS_SKEW", "0")):
        from tests.faults.suite import shim

        shim.skew(skew)


def drop_messages(*, keep_reconciler: bool) -> None:
    from app.core.jobs import TaskSender
    from workers import celery_app
    from workers.reconcile import reconcile

    is_reconciling = False
    enqueue = TaskSender.enqueue

    async def reconcile_with_messages(*arguments: Any) -> None:
        nonlocal is_reconciling
        is_reconciling = True
        try:
            await reconcile(*arguments)
        finally:
            is_reconciling = False

    def enqueue_if_reconciling(self: TaskSender, tasks: Any) -> None:
        if is_reconciling:
            enqueue(self, tasks)

    if keep_reconciler:
        celery_app.reconcile = reconcile_with_messages  # type: ignore[assignment, attr-defined]
    TaskSender.enqueue = enqueue_if_reconciling  # type: ignore[method-assign]


def repeat_messages(times: int) -> None:
    from celery import Celery

    send = Celery.send_task

    def send_repeatedly(self: Celery, *arguments: Any, **options: Any) -> Any:
        for _ in range(times - 1):
            send(self, *arguments, **options)
        return send(self, *arguments, **options)

    Celery.send_task = send_repeatedly


def shorten_retries(speedup: float) -> None:
    from app.core.jobs import RETRY_INTERVALS

    RETRY_INTERVALS.update({name: seconds / speedup for name, seconds in RETRY_INTERVALS.items()})
