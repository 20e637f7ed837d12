"""The sweep: every message lost, and the work is finished all the same."""

from collections.abc import Iterable

from app.core.database import Database
from app.core.jobs import TaskName
from app.models import Engine, EngineState, TurnState, VersionState
from tests.support.deployment import Harness
from tests.workers.training.test_assemble import rate
from workers.reconcile import reconcile
from workers.training.assemble import assemble


class DeafBell:
    """Hears what is rung, and nobody else does."""

    def __init__(self) -> None:
        self.heard: list[TaskName] = []

    def enqueue(self, stations: Iterable[TaskName]) -> None:
        self.heard += stations


async def rung(harness: Harness) -> list[TaskName]:
    bell = DeafBell()
    db = Database(harness.settings.database, bell)  # type: ignore[arg-type]
    await reconcile(db, harness.settings)
    await db.close()
    return bell.heard


async def test_every_station_with_work_is_rung(harness: Harness) -> None:
    assert await rung(harness) == []
    turn = await harness.turn()
    await harness.thumb(turn.id)
    assert await rung(harness) == ["curate"]
    await rate(harness, "+-+-+-+")
    assert await rung(harness) == ["assemble"]
    await assemble(harness.db, harness.settings)
    assert await rung(harness) == ["train"]
    await harness.version(VersionState.TRAINED)
    assert await rung(harness) == ["train", "evaluate"]
    await harness.version(VersionState.VERIFIED)
    assert await rung(harness) == ["train", "evaluate", "publish"]


async def test_an_engine_whose_supervisor_fell_silent_is_down(harness: Harness) -> None:
    async with harness.db.write() as session:
        (await session.get_one(Engine, "engine-0")).heartbeat_at = 0.0
    await rung(harness)
    [engine] = await harness.all(Engine)
    assert (engine.state, engine.reason) == (EngineState.DOWN, "its supervisor fell silent")


async def test_a_turn_that_nobody_will_finish_is_closed(harness: Harness) -> None:
    lost = await harness.turn(state=TurnState.OPEN, created_at=0.0)
    young = await harness.turn(state=TurnState.OPEN)
    await rung(harness)
    states = {turn.id: (turn.state, turn.finish_reason) for turn in await harness.all(type(lost))}
    assert states[lost.id] == (TurnState.ABORTED, "server_lost")
    assert states[young.id][0] == TurnState.OPEN
