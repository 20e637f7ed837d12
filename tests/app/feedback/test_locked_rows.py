"""A row that another transaction has locked delays only the feedback and the turns that need it. Nothing is timed:
the lock is held until the others have been answered."""

import asyncio
import zlib
from collections.abc import Iterator

import psycopg
import pytest
from psycopg.rows import TupleRow
from sqlalchemy import select

from app.feedback.repository import ADVISORY_LOCK_CLASS
from app.models import Feedback, Policy, Turn, TurnState, Version, new_id
from app.projects.service import create_project
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine
from tests.support.turns import make_turn

pytestmark = pytest.mark.parametrize(
    "database_url", [pytest.param("postgres", marks=pytest.mark.postgres)], indirect=True
)


@pytest.fixture
def other(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> Iterator[psycopg.Connection[TupleRow]]:
    """Yield a connection of another process, which holds its locks until it commits.

    Whatever waits for such a lock waits up to a minute.
    """
    monkeypatch.setattr("app.core.group_commit.LOCK_WAIT_SECONDS", 60.0)
    url = harness.settings.database_url.replace("postgresql+psycopg://", "postgresql://")
    with psycopg.connect(url) as connection:
        yield connection


def lock_turn(connection: psycopg.Connection[TupleRow], turn_id: str) -> None:
    connection.execute("SELECT 1 FROM turns WHERE id = %s FOR UPDATE", [turn_id])


async def test_votes_on_other_turns_do_not_wait_for_a_locked_turn(
    harness: Harness, other: psycopg.Connection[TupleRow]
) -> None:
    locked, *turns = [await harness.turn() for _ in range(11)]
    lock_turn(other, locked.id)
    waiting = [asyncio.create_task(harness.vote(locked.id, source={"id": f"w{number}"})) for number in range(3)]
    votes = [harness.vote(turn.id) for turn in turns for _ in range(2)]
    assert [response.status_code for response in await asyncio.gather(*votes)] == [201] * 20
    later = [harness.vote(turn.id) for turn in turns]  # while the row is known to be locked
    assert {response.status_code for response in await asyncio.gather(*later)} == {201}
    assert not any(task.done() for task in waiting)
    other.rollback()
    assert [response.status_code for response in await asyncio.gather(*waiting)] == [201] * 3
    assert len(await harness.all(Feedback)) == 33


async def test_a_row_that_stays_locked_is_a_503_of_its_votes_alone(
    harness: Harness, other: psycopg.Connection[TupleRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.core.group_commit.LOCK_WAIT_SECONDS", 0.3)
    locked, free = await harness.turn(), await harness.turn()
    lock_turn(other, locked.id)
    responses = await asyncio.gather(harness.vote(locked.id), harness.vote(free.id), harness.vote(locked.id))
    assert [response.status_code for response in responses] == [503, 201, 503]
    assert responses[0].json()["error"]["code"] == "database_unavailable"
    other.rollback()
    assert (await harness.vote(locked.id)).status_code == 201


async def test_a_batch_with_a_locked_turn_delays_neither_its_other_items_nor_other_votes(
    harness: Harness, other: psycopg.Connection[TupleRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    locked, free = await harness.turn(), await harness.turn()
    items = [{"completion_id": turn.id, "kind": "binary", "value": True} for turn in (free, locked, free)]

    async def send(prefix: str) -> list[int]:
        body = {"items": [{**item, "id": f"{prefix}-{number}"} for number, item in enumerate(items)]}
        response = await harness.api.post("/v1/feedback/batch", json=body)
        assert response.status_code == 200, response.text
        return [item["status"] for item in response.json()["data"]]

    lock_turn(other, locked.id)
    waiting = asyncio.create_task(send("first"))
    for _ in range(5):
        assert (await harness.vote(free.id)).status_code == 201
    async with asyncio.timeout(60):
        while len([row for row in await harness.all(Feedback) if row.idempotency_key.startswith("first")]) < 2:
            await asyncio.sleep(0.02)
    assert not waiting.done()
    other.rollback()
    assert await waiting == [201, 201, 201]

    monkeypatch.setattr("app.core.group_commit.LOCK_WAIT_SECONDS", 0.3)
    lock_turn(other, locked.id)
    assert await send("second") == [201, 503, 201]
    other.rollback()
    assert await send("second") == [200, 201, 200]


async def test_votes_of_other_projects_do_not_wait_for_a_projects_lock(
    harness: Harness, other: psycopg.Connection[TupleRow]
) -> None:
    """As while another process stores a large batch of one project."""
    turn = await harness.turn()
    async with harness.db.write() as session:
        project, key = await create_project(session, "second", "second", harness.settings.model)
        policy = (await session.scalars(select(Policy).where(Policy.project_id == project.id))).one()
        version = (await session.scalars(select(Version).where(Version.policy_id == policy.id))).one()
        foreign = make_turn(policy, version, new_id("chatcmpl"))
        session.add(foreign)
    lock = zlib.crc32(turn.project_id.encode()) - 2**31
    other.execute("SELECT pg_advisory_xact_lock(%s, %s)", [ADVISORY_LOCK_CLASS, lock])
    waiting = asyncio.create_task(harness.vote(turn.id))
    body = {"completion_id": foreign.id, "kind": "binary", "value": "up"}
    headers = {"authorization": f"Bearer {key}"}
    for _ in range(5):
        assert (await harness.api.post("/v1/feedback", json=body, headers=headers)).status_code == 201
    assert not waiting.done()
    other.rollback()
    assert (await waiting).status_code == 201


async def test_replies_end_while_the_turn_of_another_one_is_locked(
    harness: Harness, scripted: ScriptedEngine, other: psycopg.Connection[TupleRow]
) -> None:
    body = {"model": "shop", "messages": [{"role": "user", "content": "hello"}]}
    first = await harness.api.post("/v1/chat/completions", json=body)
    lock_turn(other, first.json()["id"])
    vote = asyncio.create_task(harness.vote(first.json()["id"]))
    replies = await asyncio.gather(*(harness.api.post("/v1/chat/completions", json=body) for _ in range(5)))
    assert {reply.status_code for reply in replies} == {200}
    assert not vote.done()
    other.rollback()
    assert (await vote).status_code == 201
    assert {turn.state for turn in await harness.all(Turn)} == {TurnState.DONE}
