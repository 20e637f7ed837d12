"""No stage scans a table that grows with the history, so that the cost of training stays constant."""

import json
import re
from typing import Any

import psycopg
import pytest
from sqlalchemy import event

from app.feedback import vote_counts
from app.models import Origin
from app.training import rollouts, sample_totals, service
from app.training.waits import explain_wait
from tests.support.deployment import Harness
from workers.curate import curate
from workers.reconcile import reconcile
from workers.training.assemble import assemble

GROWING_TABLES = (
    "turns",
    "turn_metadata",
    "feedback",
    "feedback_ranks",
    "rewards",
    "judgements",
    "samples",
    "batches",
    "rollouts",
    "audit",
    "versions",
)
SCAN = re.compile(r"Seq Scan on (\w+)")


@pytest.mark.parametrize("database_url", [pytest.param("postgres", marks=pytest.mark.postgres)], indirect=True)
async def test_every_statement_of_a_stage_uses_an_index(harness: Harness, postgres: str) -> None:
    statements: dict[str, Any] = {}

    @event.listens_for(harness.db.engine.sync_engine, "before_cursor_execute")
    @event.listens_for(harness.db._sync, "before_cursor_execute")
    def record(conn: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: bool) -> None:
        if statement.startswith(("SELECT", "UPDATE", "DELETE", "WITH")) and not many:
            statements[statement] = parameters

    for number in range(harness.settings.trainer.batch_size):
        turn = await harness.turn(conversation_id=f"c-{number}")
        feedback = {"completion_id": turn.id, "kind": "binary", "value": number % 2 == 0}
        feedback["source"] = {"id": f"ada-{number}"}
        assert (await harness.api.post("/v1/feedback", json=feedback)).status_code == 201
    statements.clear()
    assert await curate(harness.db, harness.settings) == harness.settings.trainer.batch_size
    assert await assemble(harness.db, harness.settings) == 1
    await reconcile(harness.db, harness.settings)
    async with harness.db.read() as session:
        for origin in (Origin.GROUP_SAMPLE, Origin.SHADOW):
            assert await rollouts.count_recent_tokens(session, (await harness.policy()).id, origin) == 0
        policy = await harness.policy()
        await vote_counts.count_votes(session, policy.project_id, [policy.id])
        await vote_counts.count_by_version(session, policy)
        await vote_counts.measure_delays(session, policy)
        await sample_totals.count_waiting(session, [policy.id])
        counts = await service.count_samples(session, policy, harness.settings)
        await explain_wait(session, policy, counts, harness.settings, triggered=False)
    await harness.db.run_read(rollouts.count_by_state)
    assert len(statements) > 20
    url = harness.settings.database_url.replace("postgresql+psycopg://", "postgresql://")
    table_scans = {}
    with psycopg.connect(url) as server:
        server.execute("SET enable_seqscan = off")  # so that a table is scanned only where no index can be used
        for statement, parameters in statements.items():
            plan = server.execute(f"EXPLAIN {statement}", parameters).fetchall()
            scanned = SCAN.findall("\n".join(line for (line,) in plan))
            if tables := set(scanned) & set(GROWING_TABLES):
                table_scans[statement] = sorted(tables)
    assert not table_scans, json.dumps(table_scans, indent=1)
