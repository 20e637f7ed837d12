"""Errors of the database are logged: they hold no values, and no statement of a hundred kilobytes."""

from typing import Any

import pytest
from sqlalchemy import BindParameter, bindparam, cast, insert, select, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.exc import DBAPIError

from app.core.database import Database
from app.core.errors import is_database_outage
from app.models import Feedback, Project
from tests.support.deployment import Harness

SECRET = "my neighbour is called Ada"


async def fail(db: Database, statement: Any, parameters: Any = None) -> DBAPIError:
    with pytest.raises(DBAPIError) as caught:
        async with db.write() as session:
            await session.execute(statement, parameters)
    return caught.value


async def test_long_statement_is_shortened(db: Database) -> None:
    ids = [f"{SECRET} {number}" for number in range(1000)]
    error = await fail(db, select(Project.id).where(Project.id.in_(ids), text("no_such_column = 1")))
    assert len(str(error)) < 1000 and "no_such_column" in str(error) and "SELECT projects.id" in str(error)
    assert SECRET not in repr(error) + str(error) + str(error.orig)


async def test_value_of_a_unique_column_is_hidden(db: Database) -> None:
    error = await fail(db, insert(Project), [{"id": id, "name": SECRET} for id in "ab"])
    assert "unique" in str(error).lower() and SECRET not in str(error) + str(error.orig)


async def test_row_that_breaks_a_condition_is_hidden(harness: Harness) -> None:
    turn = await harness.turn()
    row = {"id": "fb-1", "project_id": turn.project_id, "target": turn.id, "comment": SECRET, "kind": "comment"}
    error = await fail(harness.db, insert(Feedback), row | {"name": None})
    assert "null" in str(error).lower() and SECRET not in str(error) + str(error.orig)


async def test_value_that_cannot_be_read_is_hidden(db: Database) -> None:
    if db.embedded:
        pytest.skip("SQLite stores any text")
    for type_name in ("integer", "double precision"):
        error = await fail(db, text(f"SELECT CAST(CAST(:value AS text) AS {type_name})"), {"value": SECRET})
        assert "invalid input syntax for type" in str(error) and SECRET not in str(error) + str(error.orig)
    value: BindParameter[str] = bindparam("value")
    error = await fail(db, select(cast(cast(value, Project.name.type), JSONB)), {"value": f'{{"a": {SECRET}}}'})
    assert "json" in str(error) and "my" not in str(error).split("[SQL")[0]


async def test_run_write_hides_values_too(db: Database) -> None:
    with pytest.raises(DBAPIError) as caught:
        await db.run_write(lambda connection: connection.execute(insert(Project), [{"id": SECRET}, {"id": SECRET}]))
    assert SECRET not in str(caught.value) + str(caught.value.orig)


@pytest.mark.postgres
@pytest.mark.parametrize("threads", [False, True])
async def test_statement_that_was_prepared_before_a_migration_is_an_outage(postgres: str, threads: bool) -> None:
    """The connections of a process that goes on meanwhile are replaced, so that its next statements work."""
    async with Database(postgres) as db, Database(postgres) as migration:

        async def read() -> Any:
            if threads:
                return await db.run_write(lambda connection: connection.scalar(text("SELECT number FROM numbered")))
            async with db.write() as session:
                return await session.scalar(text("SELECT number FROM numbered"))

        async def run(statement: str) -> None:
            async with migration.write() as session:
                await session.execute(text(statement))

        await run("CREATE TABLE numbered AS SELECT 1::integer AS number")
        try:
            for _ in range(10):  # the driver prepares a statement that it has seen a few times; a rollback forgets it
                assert await read() == 1
            await run("ALTER TABLE numbered ALTER COLUMN number TYPE bigint")
            with pytest.raises(DBAPIError, match="cached plan") as caught:
                await read()
            assert is_database_outage(caught.value)
            assert await read() == 1
        finally:
            await run("DROP TABLE numbered")


@pytest.mark.postgres
@pytest.mark.parametrize("threads", [False, True])
async def test_server_that_has_become_read_only_is_left_and_is_an_outage(postgres: str, threads: bool) -> None:
    """As after a failover that sessions survive: each connection knows the old server only."""
    async with Database(postgres) as db:

        async def write(statement: str = "UPDATE projects SET name = name") -> None:
            if threads:
                await db.run_write(lambda connection: connection.execute(text(statement)))
                return
            async with db.write() as session:
                await session.execute(text(statement))

        await write("SET default_transaction_read_only = on")  # of this connection
        with pytest.raises(DBAPIError, match="read-only transaction") as caught:
            await write()
        assert is_database_outage(caught.value)
        await write()


@pytest.mark.postgres
async def test_other_statements_that_the_database_does_not_support_are_no_outage(postgres: str) -> None:
    async with Database(postgres) as db:
        error = await fail(db, text("SELECT count(*) FROM projects FOR UPDATE"))
        assert not is_database_outage(error) and not error.connection_invalidated
