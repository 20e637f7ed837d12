"""Exports of a data subject: a client that reads slowly holds no connection to the database."""

import json

from app.models import Turn
from app.privacy import subjects
from app.privacy.subjects import SubjectNames, export_lines, find_records
from tests.support.deployment import Harness


async def test_no_connection_is_held_while_a_client_reads(harness: Harness) -> None:
    turns: list[Turn] = [await harness.turn(end_user="ada", conversation_id="c") for _ in range(2 * subjects.PAGE_SIZE)]
    for turn in turns[:3]:
        await harness.vote(turn.id, source={"kind": "HUMAN", "id": "bob"})
    other = await harness.turn()
    await harness.vote(other.id, source={"kind": "HUMAN", "id": "ada"})
    names = SubjectNames.of((await harness.policy()).project_id, "ada")
    async with harness.db.read() as session:
        records = await find_records(session, names)
    lines = b""
    async for part in export_lines(harness.db, records):
        assert harness.db.num_connections_in_use == 0
        lines += part
    rows = [json.loads(line) for line in lines.splitlines()]
    kinds = [row["object"] for row in rows]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        "turn": len(turns),
        "feedback.received": 3,
        "feedback": 1,
    }
