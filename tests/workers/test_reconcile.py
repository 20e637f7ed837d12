"""The reconciler finds all work without any message."""

import logging
from collections.abc import Iterable
from typing import Any

import pytest

from app.core.database import Database
from app.core.jobs import TaskName
from app.models import Engine, EngineState, Origin, TurnState, VersionState
from tests.support.deployment import Harness
from tests.support.updates import rate
from workers.reconcile import reconcile
from workers.release import publish
from workers.training import batches
from workers.training.assemble import assemble


class RecordingTaskSender:
    """Records the tasks and sends nothing."""

    def __init__(self) -> None:
        self.tasks: list[TaskName] = []

    def enqueue(self, tasks: Iterable[TaskName]) -> None:
        self.tasks += tasks


async def reconcile_and_list_tasks(harness: Harness) -> list[TaskName]:
    sender = RecordingTaskSender()
    db = Database(harness.settings.database_url, sender)  # type: ignore[arg-type]
    await reconcile(db, harness.settings)
    await db.close()
    return sender.tasks


async def test_every_task_with_work_is_enqueued(harness: Harness) -> None:
    assert await reconcile_and_list_tasks(harness) == []
    turn = await harness.turn()
    await harness.vote(turn.id)
    assert await reconcile_and_list_tasks(harness) == ["curate"]
    await rate(harness, "+-+-+-+")
    assert await reconcile_and_list_tasks(harness) == ["assemble"]
    await assemble(harness.db, harness.settings)
    assert await reconcile_and_list_tasks(harness) == ["train"]
    await harness.version(VersionState.TRAINED)
    assert await reconcile_and_list_tasks(harness) == ["train", "evaluate"]
    await harness.version(VersionState.VERIFIED)
    assert await reconcile_and_list_tasks(harness) == ["train", "evaluate", "publish"]


async def test_engine_without_heartbeats_is_marked_down(harness: Harness) -> None:
    async with harness.db.write() as session:
        (await session.get_one(Engine, "engine-0")).heartbeat_at = 0.0
    await reconcile_and_list_tasks(harness)
    [engine] = await harness.all(Engine)
    assert (engine.state, engine.reason) == (EngineState.DOWN, "no heartbeat of its supervisor")


@pytest.mark.parametrize("origin", [Origin.CHAT, Origin.TASK])
async def test_lost_turn_is_aborted(harness: Harness, origin: Origin) -> None:
    lost = await harness.turn(state=TurnState.OPEN, created_at=0.0, origin=origin)
    recent = await harness.turn(state=TurnState.OPEN)
    await reconcile_and_list_tasks(harness)
    states = {turn.id: (turn.state, turn.finish_reason) for turn in await harness.all(type(lost))}
    assert states[lost.id] == (TurnState.ABORTED, "server_lost")
    assert states[recent.id][0] == TurnState.OPEN


async def test_a_step_that_fails_stops_no_other_step(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: Any) -> None:
        raise KeyError("a broken row")

    monkeypatch.setattr(batches, "quarantine_poisoned", fail)
    monkeypatch.setattr(publish, "check_canaries", fail)
    lost = await harness.turn(state=TurnState.OPEN, created_at=0.0)
    async with harness.db.write() as session:
        (await session.get_one(Engine, "engine-0")).heartbeat_at = 0.0
    with caplog.at_level(logging.ERROR, "attune.reconcile"), pytest.raises(ExceptionGroup) as failure:
        await reconcile_and_list_tasks(harness)
    assert [type(error) for error in failure.value.exceptions] == [KeyError, KeyError]
    assert "quarantine_poisoned, check_canaries" in str(failure.value), "it is still visible that they failed"
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["the step quarantine_poisoned failed", "the step check_canaries failed"]
    assert (await harness.get(type(lost), lost.id)).state == TurnState.ABORTED
    assert (await harness.get(Engine, "engine-0")).state == EngineState.DOWN
