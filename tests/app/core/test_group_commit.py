"""Group commit: order, a refused item, a group that fails, a cancelled caller, an outage of the database."""

import asyncio
import threading
from collections.abc import Sequence

import pytest
from sqlalchemy import func, insert, select
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError, OperationalError

from app.core.database import Database
from app.core.errors import AttuneError, Conflict
from app.core.group_commit import GroupCommit
from app.models import Project


class Writer:
    """Writes names as projects. Names are unique, so a collision fails the transaction as a race would."""

    def __init__(self) -> None:
        self.groups: list[list[str]] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, connection: Connection, names: Sequence[str]) -> Sequence[str | AttuneError]:
        self.groups.append(list(names))
        assert self.gate.wait(60)
        good = [name for name in names if not name.startswith("refuse")]
        if good:
            connection.execute(insert(Project), [{"id": f"prj-{name}", "name": name} for name in good])
        return [Conflict(f"no {name}") if name.startswith("refuse") else f"prj-{name}" for name in names]


async def names(db: Database) -> list[str]:
    async with db.read() as session:
        return sorted(await session.scalars(select(Project.name)))


async def test_single_item_is_written_at_once(db: Database) -> None:
    writer = Writer()
    assert await GroupCommit(db, writer).submit("a") == "prj-a"
    assert (writer.groups, await names(db)) == ([["a"]], ["a"])


async def test_items_that_arrive_during_a_commit_form_the_next_group(db: Database) -> None:
    writer = Writer()
    writer.gate.clear()
    group_commit = GroupCommit(db, writer, max_group_size=3)
    tasks = [asyncio.create_task(group_commit.submit("first"))]
    while not writer.groups:
        await asyncio.sleep(0.001)
    tasks += [asyncio.create_task(group_commit.submit(f"n{index}")) for index in range(7)]
    await asyncio.sleep(0)
    writer.gate.set()
    assert await asyncio.gather(*tasks) == ["prj-first", *[f"prj-n{index}" for index in range(7)]]
    assert writer.groups == [["first"], ["n0", "n1", "n2"], ["n3", "n4", "n5"], ["n6"]]


async def test_result_is_returned_after_the_commit(db: Database) -> None:
    group_commit = GroupCommit(db, Writer())

    async def check(name: str) -> None:
        await group_commit.submit(name)
        assert name in await names(db)

    await asyncio.gather(*[check(f"n{index}") for index in range(50)])


async def test_error_result_fails_its_item_only(db: Database) -> None:
    group_commit = GroupCommit(db, Writer())
    items = ["a", "refuse-1", "b", "refuse-2"]
    results = await asyncio.gather(*map(group_commit.submit, items), return_exceptions=True)
    assert results[0::2] == ["prj-a", "prj-b"]
    assert [type(result) for result in results[1::2]] == [Conflict, Conflict]
    assert [str(result) for result in results[1::2]] == ["no refuse-1", "no refuse-2"]
    assert await names(db) == ["a", "b"]


async def test_failed_group_is_written_one_by_one(db: Database) -> None:
    writer = Writer()
    group_commit = GroupCommit(db, writer)
    await group_commit.submit("taken")
    results = await asyncio.gather(*map(group_commit.submit, ["a", "taken", "b"]), return_exceptions=True)
    assert (results[0], results[2]) == ("prj-a", "prj-b")
    assert isinstance(results[1], IntegrityError)
    assert writer.groups == [["taken"], ["a", "taken", "b"], ["a"], ["taken"], ["b"]]
    assert await names(db) == ["a", "b", "taken"]
    assert await group_commit.submit("after") == "prj-after"


async def test_cancelled_caller_does_not_withdraw_its_item(db: Database) -> None:
    writer = Writer()
    writer.gate.clear()
    group_commit = GroupCommit(db, writer)
    tasks = [asyncio.create_task(group_commit.submit(name)) for name in ("a", "b")]
    while not writer.groups:
        await asyncio.sleep(0.001)
    tasks[0].cancel()
    waiting = asyncio.create_task(group_commit.submit("c"))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.sleep(0)
    writer.gate.set()
    assert await tasks[1] == "prj-b"
    await group_commit.submit("d")
    assert tasks[0].cancelled() and waiting.cancelled()
    assert await names(db) == ["a", "b", "c", "d"]


async def test_outage_fails_the_group_and_the_next_group_succeeds(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer()
    group_commit = GroupCommit(db, writer)
    calls = 0

    def fail_to_connect(connection: Connection, names: Sequence[str]) -> Sequence[str | AttuneError]:
        nonlocal calls
        calls += 1
        raise OperationalError("INSERT", {}, Exception("the server closed the connection"))

    monkeypatch.setattr(group_commit, "_write_group", fail_to_connect)
    results = await asyncio.gather(*map(group_commit.submit, "abc"), return_exceptions=True)
    assert [type(result) for result in results] == [OperationalError] * 3
    assert calls == 1, "a single item would fail as well"
    monkeypatch.setattr(group_commit, "_write_group", writer)
    assert await group_commit.submit("a") == "prj-a"
    assert await names(db) == ["a"]


async def test_unreachable_server_fails_every_caller() -> None:
    db = Database("postgresql+psycopg://nobody@127.0.0.1:9/none")
    results = await asyncio.gather(*map(GroupCommit(db, Writer()).submit, "abc"), return_exceptions=True)
    await db.close()
    assert [type(result) for result in results] == [OperationalError] * 3


async def test_missing_results_write_nothing(db: Database) -> None:
    def return_nothing(connection: Connection, names: Sequence[str]) -> Sequence[str | AttuneError]:
        connection.execute(insert(Project), [{"id": f"prj-{name}", "name": name} for name in names])
        return []

    results = await asyncio.gather(*map(GroupCommit(db, return_nothing).submit, ["a", "b"]), return_exceptions=True)
    assert [type(result) for result in results] == [ValueError, ValueError]
    assert await names(db) == []


async def test_two_processes_write_each_item_once(db: Database) -> None:
    other = Database(str(db.engine.url.render_as_string(hide_password=False)))
    group_commits = [GroupCommit(db, Writer(), max_group_size=7), GroupCommit(other, Writer(), max_group_size=5)]
    items = [f"n{index}" for index in range(60)]
    results = await asyncio.gather(
        *[group_commit.submit(name) for name in items for group_commit in group_commits], return_exceptions=True
    )
    await other.close()
    for pair in zip(results[0::2], results[1::2], strict=True):
        assert sorted(isinstance(result, IntegrityError) for result in pair) == [False, True], pair
    async with db.read() as session:
        assert await session.scalar(select(func.count()).select_from(Project)) == 60


async def test_deadlock_with_another_process_is_retried_one_by_one(db: Database) -> None:
    if db.embedded:
        pytest.skip("SQLite has one writer, who cannot deadlock")
    other = Database(db.engine.url.render_as_string(hide_password=False))
    both = threading.Barrier(2)
    met = False

    def write_slowly(connection: Connection, names: Sequence[str]) -> Sequence[str | AttuneError]:
        nonlocal met
        for name in names:
            connection.execute(insert(Project), {"id": f"prj-{name}", "name": name})
            if not met and len(names) == 2:
                both.wait(60)
                met = True
        return [f"prj-{name}" for name in names]

    first_commit, second_commit = GroupCommit(db, write_slowly), GroupCommit(other, write_slowly)
    results = await asyncio.gather(
        *map(first_commit.submit, ["x", "y"]), *map(second_commit.submit, ["y", "x"]), return_exceptions=True
    )
    await other.close()
    assert not [result for result in results if isinstance(result, OperationalError)]
    assert await names(db) == ["x", "y"]
