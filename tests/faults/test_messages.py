"""Lost and repeated messages, a stopped trainer, clocks an hour off: a short part of `make faults`."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from app.core.jobs import TaskSender, make_celery
from tests.faults.suite import messages
from tests.faults.suite.nursery import Nursery
from tests.faults.suite.parts import on

SECONDS = 4.0
pytestmark = pytest.mark.timeout(600)


def check(told: dict[str, Any]) -> None:
    print(f"\n{told['case']}: {told['counts']}")
    assert told["wrong"] == []
    assert told["counts"]["used"] > 0


async def test_reconciler_finishes_the_work_when_every_message_is_lost(tmp_path: Path, nursery: Nursery) -> None:
    check(await on("embedded", messages.lost, tmp_path, 7, SECONDS, nursery))


async def test_with_every_message_tripled_nothing_is_done_twice(tmp_path: Path, nursery: Nursery) -> None:
    check(await on("embedded", messages.tripled, tmp_path, 7, SECONDS, nursery))


@pytest.mark.slow
async def test_trainer_stopped_past_its_lease_cannot_commit(tmp_path: Path, nursery: Nursery) -> None:
    check(await on("embedded", messages.two_trainers, tmp_path, 7, 2, nursery))


def test_message_does_not_expire_for_a_clock_an_hour_ahead(tmp_path: Path) -> None:
    task_sender = TaskSender(make_celery(None, tmp_path))
    task_sender.enqueue(["reconcile"])
    task_sender.close()
    [message] = tmp_path.glob("*.msg")
    expires = json.loads(message.read_text())["headers"]["expires"]
    assert expires is None or datetime.fromisoformat(expires) > datetime.now(UTC) + timedelta(hours=1)
