"""Feedback is recorded exactly once with many retries, orders and processes."""

import asyncio
import random
import time
from functools import partial
from typing import Any

from sqlalchemy import text, update
from sqlalchemy.engine import Connection

from app.core.database import Database
from app.core.group_commit import GroupCommit
from app.feedback import feedback_writer, kinds
from app.feedback.feedback_limits import FeedbackLimits
from app.feedback.feedback_writer import Submission, SubmissionResult
from app.models import Audit, Feedback, FeedbackRank, Reward
from tests.support.deployment import Harness
from workers.curate import curate

ITEMS, SENDS = 200, 10
LAST_INT = 2**31 - 1
LIMITS = FeedbackLimits(per_target=5000, per_source=1000, per_token=100)


async def test_200_items_sent_ten_times_are_200_rows(harness: Harness) -> None:
    turns = [await harness.turn() for _ in range(4)]
    sends = [number for number in range(ITEMS) for _ in range(SENDS)]
    random.Random(7).shuffle(sends)
    semaphore = asyncio.Semaphore(50)

    async def send(number: int) -> tuple[int, int, str]:
        async with semaphore:
            response = await harness.vote(turns[number % 4].id, id=f"k{number}")
        return number, response.status_code, response.json()["id"]

    results = await asyncio.gather(*[send(number) for number in sends])
    assert sorted(status for _, status, _ in results) == [200] * ITEMS * (SENDS - 1) + [201] * ITEMS
    rows = {row.idempotency_key: row.id for row in await harness.all(Feedback)}
    assert len(rows) == ITEMS
    assert all(rows[f"k{number}"] == id for number, _, id in results)


async def test_same_keys_in_another_order_do_not_deadlock(harness: Harness) -> None:
    turn = await harness.turn()
    bodies = [
        {"completion_id": turn.id, "kind": "binary", "value": "up", "id": f"k{number}", "source": {"id": f"u{number}"}}
        for number in range(100)
    ]
    project = turn.project_id

    async def process(seed: int) -> list[SubmissionResult]:
        db = Database(harness.settings.database_url)
        group_commit: GroupCommit[Submission, SubmissionResult] = GroupCommit(
            db, partial(feedback_writer.submit_many, limits=LIMITS), max_group_size=20
        )
        shuffled = [feedback_writer.build_submission(project, kinds.parse_feedback(body), body) for body in bodies]
        random.Random(seed).shuffle(shuffled)
        try:
            return await asyncio.gather(*[group_commit.submit(item) for item in shuffled])
        finally:
            await db.close()

    results = [result for results in await asyncio.gather(*map(process, range(3))) for result in results]
    assert sorted(result.is_replay for result in results) == [False] * 100 + [True] * 200
    assert len({result.view["id"] for result in results}) == len(await harness.all(Feedback)) == 100


async def test_two_transactions_with_shared_keys_are_serialized(harness: Harness) -> None:
    turn = await harness.turn()
    bodies = {key: {"completion_id": turn.id, "kind": "binary", "value": "up", "id": key} for key in ("a", "b")}
    items = {
        key: feedback_writer.build_submission(turn.project_id, kinds.parse_feedback(body), body)
        for key, body in bodies.items()
    }

    async def process(order: str) -> list[bool]:
        db = Database(harness.settings.database_url)
        replayed = []

        def work(connection: Connection) -> None:
            for key in order:
                [result] = feedback_writer.submit_many(connection, [items[key]], LIMITS)
                assert isinstance(result, SubmissionResult)
                replayed.append(result.is_replay)
                time.sleep(0.2)

        await db.run_write(work)
        await db.close()
        return replayed

    both = await asyncio.gather(process("ab"), process("ba"))
    assert sorted(both) == [[False, False], [True, True]]


async def test_group_has_fixed_number_of_statements(harness: Harness) -> None:
    a, b = [await harness.turn(conversation_id="c") for _ in range(2)]
    bodies: list[dict[str, Any]] = [
        {"completion_id": a.id, "kind": "binary", "value": True, "id": "k"},
        {"completion_id": a.id, "kind": "comment", "value": "hm"},
        {"kind": "comparison", "value": [a.id, b.id]},
        {"kind": "rating", "value": 3, "target": {"conversation_id": "c"}},
    ]
    items = [feedback_writer.build_submission(a.project_id, kinds.parse_feedback(body), body) for body in bodies]
    foreign = [feedback_writer.build_submission("proj-other", kinds.parse_feedback(body), body) for body in bodies]
    counts = []
    for times in (1, 2, 20):  # from the second time on, the item with an id is a replay, which takes one more
        executed: list[str] = []

        def work(connection: Connection, executed: list[str] = executed, times: int = times) -> Any:
            stop = collect_statements(connection, executed)
            outcomes = feedback_writer.submit_many(connection, (items + foreign) * times, LIMITS)
            stop()
            return outcomes

        outcomes = await harness.db.run_write(work)
        counts.append(len(executed))
        assert [getattr(outcome, "status", 201) for outcome in outcomes[:8]] == [201] * 4 + [404] * 4
    assert counts[0] <= counts[1] == counts[2] <= 9


def collect_statements(connection, executed):  # type: ignore[no-untyped-def]
    """Collect the statements that are sent to the database; return a function that stops it."""
    from sqlalchemy import event

    def collect(conn, cursor, statement, parameters, context, executemany):  # type: ignore[no-untyped-def]
        executed.append(statement)

    event.listen(connection, "before_cursor_execute", collect)
    return lambda: event.remove(connection, "before_cursor_execute", collect)


async def test_replays_use_up_no_numbers(harness: Harness) -> None:
    turn = await harness.turn()
    for _ in range(10):
        await harness.vote(turn.id, id="again")
    batch = [{"completion_id": turn.id, "kind": "binary", "value": "up", "id": "again"}] * 5
    for _ in range(3):
        await harness.api.post("/v1/feedback/batch", json={"items": [*batch, {**batch[0], "id": "other"}]})
    await harness.vote(turn.id, id="last")
    numbers = [row.seq for row in await harness.all(Feedback)]
    assert [number - numbers[0] for number in numbers] == [0, 1, 2]


async def test_numbers_may_have_more_than_32_bits(harness: Harness) -> None:
    """Rankings, rewards, totals of votes, streams and lists hold them, too."""
    turns = [(await harness.turn()).id for _ in range(2)]
    await harness.vote(turns[0])
    async with harness.db.write() as session:
        if harness.db.embedded:  # the next number is one more than the largest
            await session.execute(update(Feedback).values(seq=LAST_INT))
        else:
            for table in ("feedback", "audit"):
                await session.execute(text(f"SELECT setval(pg_get_serial_sequence('{table}', 'seq'), {LAST_INT})"))
    await harness.vote(turns[1], "down")
    ranking = {"kind": "comparison", "value": turns}
    assert (await harness.api.post("/v1/feedback", json=ranking)).status_code == 201
    assert (await harness.api.post("/v1/keys", json={"name": "k"})).status_code == 201
    await curate(harness.db, harness.settings)
    assert {row.feedback_seq for row in await harness.all(Reward)} >= {LAST_INT + 1, LAST_INT + 2}
    assert {row.feedback_seq for row in await harness.all(FeedbackRank)} == {LAST_INT + 2}
    [entry] = await harness.all(Audit)
    if not harness.db.embedded:
        assert entry.seq == LAST_INT + 1
    page = (await harness.api.get("/v1/audit", params={"after": entry.seq})).json()
    assert page["data"] == []
    listed = (await harness.api.get("/v1/feedback", params={"completion_id": turns[1]})).json()["data"]
    assert len(listed) == 2
