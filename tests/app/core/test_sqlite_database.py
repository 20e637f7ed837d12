"""The embedded database ends statements that run for too long, and nobody waits for its one writer without a limit."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from app.core.database import Database
from app.core.settings import Settings
from app.models import Feedback
from tests.support.deployment import Harness

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
# Some ten seconds of work, so that a database without a limit fails the test and does not hang it.
ENDLESS = text(
    "WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers LIMIT 40000000) "
    "SELECT count(*) FROM numbers"
)


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.replace({"database.request_timeout_seconds": 0.5, "database.long_timeout_seconds": 1.0})


@pytest.fixture
async def limited(settings: Settings) -> AsyncIterator[Database]:
    async with Database(settings.database_url, seconds=0.2, long_seconds=0.4) as db:
        yield db


@pytest.fixture
def other(settings: Settings) -> Iterator[sqlite3.Connection]:
    """Yield a connection as of another process, with SQLite's writer."""
    path = Path(settings.database_url.removeprefix("sqlite+aiosqlite:///"))
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    yield connection
    connection.close()


async def test_a_statement_that_runs_for_too_long_is_ended(limited: Database) -> None:
    for db in (limited, limited.with_long_timeout):
        for opened in (db.read(), db.read_snapshot()):
            with pytest.raises(OperationalError, match="interrupted"):
                async with opened as session:
                    await session.execute(ENDLESS)
        with pytest.raises(OperationalError, match="interrupted"):
            async with db.write() as session:
                await session.execute(ENDLESS)
        for run in (db.run_read, db.run_write):
            with pytest.raises(OperationalError, match="interrupted"):
                await run(lambda connection: connection.execute(ENDLESS).scalar())
            assert await run(lambda connection: connection.execute(text("SELECT 1")).scalar()) == 1
        async with db.read() as session:  # the connections are as good as before
            assert await session.scalar(text("SELECT 1")) == 1


async def test_the_limit_is_that_of_a_statement_and_not_of_a_transaction(limited: Database) -> None:
    async with limited.write() as session:
        await session.execute(text("SELECT 1"))
        await asyncio.sleep(0.3)
        await session.execute(text("UPDATE projects SET name = name"))

    def read(connection: object) -> int:
        result = connection.execute(text("SELECT 1 UNION ALL SELECT 2"))  # type: ignore[attr-defined]
        return sum(row[0] for row in result)

    assert await limited.run_read(read) == 3


async def test_a_request_that_needs_too_long_is_a_503(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    async def read_views(session: object, *args: object) -> list[object]:
        await session.execute(ENDLESS)  # type: ignore[attr-defined]
        return []

    monkeypatch.setattr("app.feedback.queries.read_views", read_views)
    turn = await harness.turn()
    refused = await harness.api.get(f"/v1/feedback?completion_id={turn.id}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "database_unavailable")
    assert int(refused.headers["retry-after"]) >= 1


async def test_a_writer_of_this_process_is_waited_for_in_order_and_not_for_ever(limited: Database) -> None:
    written: list[str] = []

    async def write(name: str) -> None:
        async with limited.write() as session:
            await session.execute(text("UPDATE projects SET name = name"))
            written.append(name)

    async with limited.write():
        for refused in (limited.run_write(lambda connection: None), write("too late")):
            with pytest.raises(PoolTimeout):
                await refused
        with pytest.raises(PoolTimeout):  # one queue for both limits: SQLite has one writer
            async with limited.with_long_timeout.write():
                pass
        limited._wait_seconds = 60.0  # each needs its time
        waiting = [asyncio.create_task(write(name)) for name in ("first", "second", "third")]
        await asyncio.sleep(0)
    await asyncio.gather(*waiting)
    assert written == ["first", "second", "third"]


async def test_a_writer_of_another_process_is_not_waited_for_for_ever(
    limited: Database, other: sqlite3.Connection
) -> None:
    with pytest.raises(OperationalError, match="locked"):
        async with limited.write() as session:
            await session.execute(text("SELECT 1"))
    with pytest.raises(OperationalError, match="locked"):
        await limited.run_write(lambda connection: None)
    async with limited.read() as session:  # nobody waits to read
        assert await session.scalar(text("SELECT count(*) FROM projects")) == 0
    other.execute("ROLLBACK")
    async with limited.write() as session:
        await session.execute(text("UPDATE projects SET name = name"))


async def test_a_vote_that_cannot_be_written_is_a_503_and_can_be_sent_again(
    harness: Harness, other: sqlite3.Connection
) -> None:
    other.execute("ROLLBACK")
    turn = await harness.turn()
    other.execute("BEGIN IMMEDIATE")
    refused = await harness.vote(turn.id, id="v-1")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "database_unavailable")
    assert int(refused.headers["retry-after"]) >= 1
    batch = {"items": [{"completion_id": turn.id, "kind": "binary", "value": True}]}
    assert (await harness.api.post("/v1/feedback/batch", json=batch)).status_code == 503
    assert (await harness.api.get("/v1/policies/shop/votes")).status_code == 200
    other.execute("ROLLBACK")
    assert (await harness.vote(turn.id, id="v-1")).status_code == 201
    assert len(await harness.all(Feedback)) == 1
