"""The sweep: every message lost, and the work is finished all the same."""

from collections.abc import Iterable

from app.core.database import Database
from app.core.jobs import Station
from app.models import Engine, EngineState, TurnState, VersionState
from tests.support.deployment import Ring
from tests.workers.training.test_assemble import rate
from workers.reconcile import sweep
from workers.training.assemble import assemble


class DeafBell:
    """Hears what is rung, and nobody else does."""

    def __init__(self) -> None:
        self.heard: list[Station] = []

    def ring(self, stations: Iterable[Station]) -> None:
        self.heard += stations


async def rung(ring: Ring) -> list[Station]:
    bell = DeafBell()
    db = Database(ring.settings.database, bell)  # type: ignore[arg-type]
    await sweep(db, ring.settings)
    await db.close()
    return bell.heard


async def test_every_station_with_work_is_rung(ring: Ring) -> None:
    assert await rung(ring) == []
    turn = await ring.turn()
    await ring.thumb(turn.id)
    assert await rung(ring) == ["curate"]
    await rate(ring, "+-+-+-+")
    assert await rung(ring) == ["assemble"]
    await assemble(ring.db, ring.settings)
    assert await rung(ring) == ["train"]
    await ring.version(VersionState.TRAINED)
    assert await rung(ring) == ["train", "evaluate"]
    await ring.version(VersionState.PROVEN)
    assert await rung(ring) == ["train", "evaluate", "publish"]


async def test_an_engine_whose_supervisor_fell_silent_is_down(ring: Ring) -> None:
    async with ring.db.write() as session:
        (await session.get_one(Engine, "engine-0")).heartbeat_at = 0.0
    await rung(ring)
    [engine] = await ring.all(Engine)
    assert (engine.state, engine.reason) == (EngineState.DOWN, "its supervisor fell silent")


async def test_a_turn_that_nobody_will_finish_is_closed(ring: Ring) -> None:
    lost = await ring.turn(state=TurnState.OPEN, created_at=0.0)
    young = await ring.turn(state=TurnState.OPEN)
    await rung(ring)
    states = {turn.id: (turn.state, turn.finish_reason) for turn in await ring.all(type(lost))}
    assert states[lost.id] == (TurnState.ABORTED, "server_lost")
    assert states[young.id][0] == TurnState.OPEN
