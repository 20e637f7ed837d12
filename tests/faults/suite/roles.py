"""What a forked child is: the real main of one process kind, and the switches that a fault needs."""

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from typing import Any


def play(kind: str) -> None:
    set_switches()
    ROLES[kind]()


def api() -> None:
    from app.cli.server import serve

    serve()


def station(*arguments: str) -> None:
    from workers import celery_app

    sys.argv = ["celery", *arguments]
    celery_app.main()


def trainer() -> None:
    """Rank 0 without torchrun, with a stand-in for the learning: claim, heartbeat, export and commit are the real."""
    from tests.faults.suite.learner import StandIn
    from workers import trainer as real
    from workers.training import ranks

    ranks.Trainer = StandIn  # type: ignore[assignment,misc]
    sys.argv = ["trainer"]
    real.main()


def engine() -> None:
    from app.core.settings import get_settings
    from workers.engine import __main__ as real

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    asyncio.run(real.run(get_settings()))


ROLES: dict[str, Callable[[], None]] = {
    "api": api,
    "worker": lambda: station("attune"),
    "judge": lambda: station("judge"),
    "rollout": lambda: station("rollout"),
    "publisher": lambda: station("publish"),
    "trainer": trainer,
    "trainer-2": trainer,
    "beat": lambda: station("beat"),
    "engine": engine,
}


def set_switches() -> None:
    """FAULTS_RINGS: `none`, `reconcile` (only its messages arrive) or `3` (every message is sent three times).
    FAULTS_SKEW: seconds that this process's wall clock is wrong. FAULTS_HASTE: pauses between attempts to reach a
    broker are so many times shorter.
    """
    delivery = os.environ.get("FAULTS_RINGS", "")
    if delivery in ("none", "reconcile"):
        drop_messages(messages=delivery)
    elif delivery:
        repeat_messages(int(delivery))
    if haste := float(os.environ.get("FAULTS_HASTE", "0")):
        hurry(haste)
    if skew := float(os.environ.get("FAULTS_SKEW", "0")):
        from tests.faults.suite import shim

        shim.skew(skew)


def drop_messages(messages: str) -> None:
    from app.core.jobs import TaskSender
    from workers import celery_app

    sweeping = False
    harness, reconcile = TaskSender.enqueue, celery_app.reconcile

    async def swept(*arguments: Any) -> None:
        nonlocal sweeping
        sweeping = True
        try:
            await reconcile(*arguments)
        finally:
            sweeping = False

    def rung(self: TaskSender, stations: Any) -> None:
        if sweeping:
            harness(self, stations)

    if messages == "reconcile":
        celery_app.reconcile = swept
    TaskSender.enqueue = rung  # type: ignore[method-assign]


def repeat_messages(times: int) -> None:
    from celery import Celery

    send = Celery.send_task

    def sent(self: Celery, *arguments: Any, **options: Any) -> Any:
        for _ in range(times - 1):
            send(self, *arguments, **options)
        return send(self, *arguments, **options)

    Celery.send_task = sent


def hurry(haste: float) -> None:
    from app.core.jobs import BrokerConnection

    for pause in ("retry_start", "retry_step", "retry_max"):
        setattr(BrokerConnection, pause, getattr(BrokerConnection, pause) / haste)
