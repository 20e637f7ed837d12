"""Learning does not become dearer with what has been learned: no station reads a whole table, however large."""

import json
import re
from typing import Any

import psycopg
import pytest
from sqlalchemy import event

from app.models import Origin
from app.training.rollouts import repository
from tests.support.deployment import Ring
from workers.feedback.curate import curate
from workers.reconcile import sweep
from workers.training.assemble import assemble

GROWS = ("turns", "turn_pairs", "feedback", "feedback_ranks", "rewards", "judgements", "samples", "batches", "rollouts")
SCAN = re.compile(r"Seq Scan on (\w+)")


@pytest.mark.parametrize("database_url", [pytest.param("postgres", marks=pytest.mark.postgres)], indirect=True)
async def test_every_statement_of_a_station_finds_its_rows_by_an_index(ring: Ring, postgres: str) -> None:
    asked: dict[str, Any] = {}

    @event.listens_for(ring.db.engine.sync_engine, "before_cursor_execute")
    def note(conn: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: bool) -> None:
        if statement.startswith(("SELECT", "UPDATE", "DELETE", "WITH")) and not many:
            asked[statement] = parameters

    for number in range(ring.settings.batch_size):
        turn = await ring.turn(conversation_id=f"c-{number}")
        said = {"completion_id": turn.id, "kind": "binary", "value": number % 2 == 0, "source": {"id": f"ada-{number}"}}
        assert (await ring.api.post("/v1/feedback", json=said)).status_code == 201
    asked.clear()
    assert await curate(ring.db, ring.settings) == ring.settings.batch_size
    assert await assemble(ring.db, ring.settings) == 1
    await sweep(ring.db, ring.settings)
    async with ring.db.read() as session:
        for origin in (Origin.SHADOW, Origin.REHEARSAL):
            assert await repository.spent(session, (await ring.policy()).id, origin) == 0
    assert len(asked) > 20
    url = ring.settings.database.replace("postgresql+psycopg://", "postgresql://")
    whole = {}
    with psycopg.connect(url) as server:
        server.execute("SET enable_seqscan = off")  # so that a table is read whole only where nothing else is possible
        for statement, parameters in asked.items():
            plan = server.execute(f"EXPLAIN {statement}", parameters).fetchall()
            if found := {name for name in SCAN.findall("\n".join(line for (line,) in plan)) if name in GROWS}:
                whole[statement] = sorted(found)
    assert not whole, json.dumps(whole, indent=1)
