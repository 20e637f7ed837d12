"""Lost and repeated messages, a stopped trainer, clocks an hour off: a short part of `make faults`."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from app.core.jobs import TaskSender, make_celery
from tests.faults.suite import messages
from tests.faults.suite.cases import run_on
from tests.faults.suite.fork_server_client import ForkServerClient

SECONDS = 4.0
pytestmark = pytest.mark.timeout(600)


def check(row: dict[str, Any]) -> None:
    print(f"\n{row['case']}: {row['counts']}")
    assert row["errors"] == []
    assert row["counts"]["used"] > 0


@pytest.mark.slow
async def test_reconciler_finishes_the_work_when_every_message_is_lost(
    tmp_path: Path, fork_server: ForkServerClient
) -> None:
    check(await run_on("embedded", messages.lose_messages, tmp_path, 7, SECONDS, fork_server))


@pytest.mark.slow
async def test_nothing_is_done_twice_when_every_message_is_tripled(
    tmp_path: Path, fork_server: ForkServerClient
) -> None:
    check(await run_on("embedded", messages.triple_messages, tmp_path, 7, SECONDS, fork_server))


@pytest.mark.slow
async def test_trainer_stopped_past_its_lease_cannot_commit(tmp_path: Path, fork_server: ForkServerClient) -> None:
    check(await run_on("embedded", messages.stop_a_trainer, tmp_path, 7, 2, fork_server))


def test_message_does_not_expire_for_a_clock_an_hour_ahead(tmp_path: Path) -> None:
    task_sender = TaskSender(make_celery(None, tmp_path))
    task_sender.enqueue(["reconcile"])
    task_sender.close()
    [message] = tmp_path.glob("*.msg")
    expires = json.loads(message.read_text())["headers"]["expires"]
    assert expires is None or datetime.fromisoformat(expires) > datetime.now(UTC) + timedelta(hours=1)
