"""Messages lost and tripled, a trainer that wakes too late, clocks an hour off: a short slice of `make faults`."""

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


async def test_with_every_nudge_lost_the_sweep_finishes_the_work(tmp_path: Path, nursery: Nursery) -> None:
    check(await on("embedded", messages.lost, tmp_path, 7, SECONDS, nursery))


async def test_with_every_message_tripled_nothing_is_done_twice(tmp_path: Path, nursery: Nursery) -> None:
    check(await on("embedded", messages.tripled, tmp_path, 7, SECONDS, nursery))


async def test_a_trainer_stopped_past_its_lease_cannot_commit_what_another_has_trained(
    tmp_path: Path, nursery: Nursery
) -> None:
    check(await on("embedded", messages.two_trainers, tmp_path, 7, 2, nursery))


def test_a_worker_whose_clock_is_an_hour_ahead_hears_the_bell(tmp_path: Path) -> None:
    bell = TaskSender(make_celery(None, tmp_path))
    bell.enqueue(["reconcile"])
    bell.close()
    [message] = tmp_path.glob("*.msg")
    expires = json.loads(message.read_text())["headers"]["expires"]
    assert expires is None or datetime.fromisoformat(expires) > datetime.now(UTC) + timedelta(hours=1)
