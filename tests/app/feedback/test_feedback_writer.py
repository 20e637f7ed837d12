"""Exactly once, whoever sends how often, in whatever order, through however many processes."""

import asyncio
import random
import time
from typing import Any

from sqlalchemy.engine import Connection

from app.core.database import Database
from app.core.group_commit import GroupCommit
from app.feedback import kinds, service, submission
from app.feedback.service import Receipt
from app.feedback.submission import Item
from app.models import Feedback
from tests.support.deployment import Harness

ITEMS, SENDS = 200, 10


async def test_two_hundred_items_sent_ten_times_at_once_are_two_hundred_rows(harness: Harness) -> None:
    turns = [await harness.turn() for _ in range(4)]
    sends = [number for number in range(ITEMS) for _ in range(SENDS)]
    random.Random(7).shuffle(sends)
    line = asyncio.Semaphore(50)

    async def send(number: int) -> tuple[int, int, str]:
        async with line:
            answer = await harness.thumb(turns[number % 4].id, id=f"k{number}")
        return number, answer.status_code, answer.json()["id"]

    answers = await asyncio.gather(*[send(number) for number in sends])
    assert sorted(status for _, status, _ in answers) == [200] * ITEMS * (SENDS - 1) + [201] * ITEMS
    rows = {row.idempotency_key: row.id for row in await harness.all(Feedback)}
    assert len(rows) == ITEMS
    assert all(rows[f"k{number}"] == id for number, _, id in answers)


async def test_processes_that_hold_the_same_keys_in_another_order_do_not_lock_each_other_out(harness: Harness) -> None:
    turn = await harness.turn()
    bodies = [
        {"completion_id": turn.id, "kind": "binary", "value": "up", "id": f"k{number}", "source": {"id": f"u{number}"}}
        for number in range(100)
    ]
    project = turn.project_id

    async def process(seed: int) -> list[Receipt]:
        db = Database(harness.settings.database)
        gather: GroupCommit[Item, Receipt] = GroupCommit(db, service.submit_many, most=20)
        mine = [submission.make(project, kinds.read(body), body) for body in bodies]
        random.Random(seed).shuffle(mine)
        try:
            return await asyncio.gather(*[gather.submit(one) for one in mine])
        finally:
            await db.close()

    receipts = [receipt for several in await asyncio.gather(*map(process, range(3))) for receipt in several]
    assert sorted(receipt.replayed for receipt in receipts) == [False] * 100 + [True] * 200
    assert len({receipt.view["id"] for receipt in receipts}) == len(await harness.all(Feedback)) == 100


async def test_two_transactions_that_want_each_others_keys_take_turns(harness: Harness) -> None:
    turn = await harness.turn()
    bodies = {key: {"completion_id": turn.id, "kind": "binary", "value": "up", "id": key} for key in ("a", "b")}
    items = {key: submission.make(turn.project_id, kinds.read(body), body) for key, body in bodies.items()}

    async def process(order: str) -> list[bool]:
        db = Database(harness.settings.database)
        replayed = []

        def work(connection: Connection) -> None:
            for key in order:
                [receipt] = service.submit_many(connection, [items[key]])
                assert isinstance(receipt, Receipt)
                replayed.append(receipt.replayed)
                time.sleep(0.2)

        await db.run_write(work)
        await db.close()
        return replayed

    both = await asyncio.gather(process("ab"), process("ba"))
    assert sorted(both) == [[False, False], [True, True]]


async def test_many_projects_and_kinds_share_a_commit_and_a_fixed_number_of_statements(harness: Harness) -> None:
    a, b = [await harness.turn(conversation_id="c") for _ in range(2)]
    bodies = [
        {"completion_id": a.id, "kind": "binary", "value": True, "id": "k"},
        {"completion_id": a.id, "kind": "comment", "value": "hm"},
        {"kind": "comparison", "value": [a.id, b.id]},
        {"kind": "rating", "value": 3, "target": {"conversation_id": "c"}},
    ]
    items = [submission.make(a.project_id, kinds.read(body), body) for body in bodies]
    foreign = [submission.make("proj-other", kinds.read(body), body) for body in bodies]
    counts = []
    for times in (1, 20):
        heard: list[str] = []

        def work(connection: Connection, heard: list[str] = heard, times: int = times) -> Any:
            listener = statements(connection, heard)
            outcomes = service.submit_many(connection, (items + foreign) * times)
            listener()
            return outcomes

        outcomes = await harness.db.run_write(work)
        counts.append(len(heard))
        assert [getattr(one, "status", 201) for one in outcomes[:8]] == [201] * 4 + [404] * 4
    assert counts[0] == counts[1] <= 6


def statements(connection, heard):  # type: ignore[no-untyped-def]
    """Collects what is sent to the database; returns how to stop."""
    from sqlalchemy import event

    def note(conn, cursor, statement, parameters, context, executemany):  # type: ignore[no-untyped-def]
        heard.append(statement)

    event.listen(connection, "before_cursor_execute", note)
    return lambda: event.remove(connection, "before_cursor_execute", note)
