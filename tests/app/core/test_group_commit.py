"""Group commit: order, one bad item, a group that breaks, a caller who leaves, a database that is down."""

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
    """Writes names as projects: a unique name, so that a collision breaks the transaction as a race would."""

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


async def test_an_item_alone_waits_for_nobody(db: Database) -> None:
    writer = Writer()
    assert await GroupCommit(db, writer).submit("a") == "prj-a"
    assert (writer.groups, await names(db)) == ([["a"]], ["a"])


async def test_what_comes_during_a_commit_is_the_next_group_in_order(db: Database) -> None:
    writer = Writer()
    writer.gate.clear()
    gather = GroupCommit(db, writer, most=3)
    tasks = [asyncio.create_task(gather.submit("first"))]
    while not writer.groups:
        await asyncio.sleep(0.001)
    tasks += [asyncio.create_task(gather.submit(f"n{index}")) for index in range(7)]
    await asyncio.sleep(0)
    writer.gate.set()
    assert await asyncio.gather(*tasks) == ["prj-first", *[f"prj-n{index}" for index in range(7)]]
    assert writer.groups == [["first"], ["n0", "n1", "n2"], ["n3", "n4", "n5"], ["n6"]]


async def test_an_outcome_is_handed_out_after_the_commit(db: Database) -> None:
    gather = GroupCommit(db, Writer())

    async def check(name: str) -> None:
        await gather.submit(name)
        assert name in await names(db)

    await asyncio.gather(*[check(f"n{index}") for index in range(50)])


async def test_an_error_as_outcome_fails_that_item_alone(db: Database) -> None:
    gather = GroupCommit(db, Writer())
    wanted = ["a", "refuse-1", "b", "refuse-2"]
    outcomes = await asyncio.gather(*map(gather.submit, wanted), return_exceptions=True)
    assert outcomes[0::2] == ["prj-a", "prj-b"]
    assert [type(outcome) for outcome in outcomes[1::2]] == [Conflict, Conflict]
    assert [str(outcome) for outcome in outcomes[1::2]] == ["no refuse-1", "no refuse-2"]
    assert await names(db) == ["a", "b"]


async def test_a_group_that_breaks_is_tried_one_by_one(db: Database) -> None:
    writer = Writer()
    gather = GroupCommit(db, writer)
    await gather.submit("taken")
    outcomes = await asyncio.gather(*map(gather.submit, ["a", "taken", "b"]), return_exceptions=True)
    assert (outcomes[0], outcomes[2]) == ("prj-a", "prj-b")
    assert isinstance(outcomes[1], IntegrityError)
    assert writer.groups == [["taken"], ["a", "taken", "b"], ["a"], ["taken"], ["b"]]
    assert await names(db) == ["a", "b", "taken"]
    assert await gather.submit("after") == "prj-after"


async def test_a_caller_who_leaves_leaves_the_item_in(db: Database) -> None:
    writer = Writer()
    writer.gate.clear()
    gather = GroupCommit(db, writer)
    tasks = [asyncio.create_task(gather.submit(name)) for name in ("a", "b")]
    while not writer.groups:
        await asyncio.sleep(0.001)
    tasks[0].cancel()
    waiting = asyncio.create_task(gather.submit("c"))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.sleep(0)
    writer.gate.set()
    assert await tasks[1] == "prj-b"
    await gather.submit("d")
    assert tasks[0].cancelled() and waiting.cancelled()
    assert await names(db) == ["a", "b", "c", "d"]


async def test_a_database_that_is_down_fails_the_group_and_the_next_one_finds_it_up(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer()
    gather = GroupCommit(db, writer)
    calls = 0

    def down(connection: Connection, names: Sequence[str]) -> Sequence[str | AttuneError]:
        nonlocal calls
        calls += 1
        raise OperationalError("INSERT", {}, Exception("the server closed the connection"))

    monkeypatch.setattr(gather, "_handle", down)
    outcomes = await asyncio.gather(*map(gather.submit, "abc"), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [OperationalError] * 3
    assert calls == 1, "alone it would be no better"
    monkeypatch.setattr(gather, "_handle", writer)
    assert await gather.submit("a") == "prj-a"
    assert await names(db) == ["a"]


async def test_a_server_that_is_not_there_is_told_to_every_caller() -> None:
    db = Database("postgresql+psycopg://nobody@127.0.0.1:9/none")
    outcomes = await asyncio.gather(*map(GroupCommit(db, Writer()).submit, "abc"), return_exceptions=True)
    await db.close()
    assert [type(outcome) for outcome in outcomes] == [OperationalError] * 3


async def test_outcomes_that_do_not_match_the_items_write_nothing(db: Database) -> None:
    def forgetful(connection: Connection, names: Sequence[str]) -> Sequence[str | AttuneError]:
        connection.execute(insert(Project), [{"id": f"prj-{name}", "name": name} for name in names])
        return []

    outcomes = await asyncio.gather(*map(GroupCommit(db, forgetful).submit, ["a", "b"]), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [ValueError, ValueError]
    assert await names(db) == []


async def test_two_processes_share_a_database_and_each_item_is_written_once(db: Database) -> None:
    other = Database(str(db.engine.url.render_as_string(hide_password=False)))
    gathers = [GroupCommit(db, Writer(), most=7), GroupCommit(other, Writer(), most=5)]
    wanted = [f"n{index}" for index in range(60)]
    outcomes = await asyncio.gather(
        *[gather.submit(name) for name in wanted for gather in gathers], return_exceptions=True
    )
    await other.close()
    for pair in zip(outcomes[0::2], outcomes[1::2], strict=True):
        assert sorted(isinstance(outcome, IntegrityError) for outcome in pair) == [False, True], pair
    async with db.read() as session:
        assert await session.scalar(select(func.count()).select_from(Project)) == 60


async def test_a_deadlock_with_another_process_is_tried_one_by_one(db: Database) -> None:
    if db.embedded:
        pytest.skip("SQLite has one writer, who cannot deadlock")
    other = Database(db.engine.url.render_as_string(hide_password=False))
    both = threading.Barrier(2)
    met = False

    def slow(connection: Connection, names: Sequence[str]) -> Sequence[str | AttuneError]:
        nonlocal met
        for name in names:
            connection.execute(insert(Project), {"id": f"prj-{name}", "name": name})
            if not met and len(names) == 2:
                both.wait(60)
                met = True
        return [f"prj-{name}" for name in names]

    here, there = GroupCommit(db, slow), GroupCommit(other, slow)
    outcomes = await asyncio.gather(
        *map(here.submit, ["x", "y"]), *map(there.submit, ["y", "x"]), return_exceptions=True
    )
    await other.close()
    assert not [outcome for outcome in outcomes if isinstance(outcome, OperationalError)]
    assert await names(db) == ["x", "y"]
