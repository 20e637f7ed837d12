"""Numbers that are never used again have 64 bits, in every column that holds them, and in databases with rows."""

import pytest
import sqlalchemy as sa
from alembic import command
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import DBAPIError

from app.core.migrate import alembic_config, upgrade
from app.models import Base
from tests.migrations import rows
from tests.migrations.test_migrations import connect

BEFORE, LAST_INT = "20261125_0600", 2**31 - 1
COUNTERS = {"feedback": "seq", "audit": "seq", "vote_totals": "id"}
# How numbers of feedback, of audit entries and of their chains are called where other tables hold them.
HOLDERS = ("seq", "_seq", "chain_number", "vote_total_id")
on_postgres = pytest.mark.parametrize(
    "empty_database", [pytest.param("postgres", marks=pytest.mark.postgres)], indirect=True
)


def add_row(connection: sa.Connection, table: str) -> int:
    """Insert a copy of the row that is there, with the next number and other unique values. Return the number."""
    reflected = sa.Table(table, sa.MetaData(), autoload_with=connection)
    [old] = connection.execute(sa.select(reflected).order_by(reflected.c[COUNTERS[table]]).limit(1)).mappings()
    changed = {name: "other" for name in ("id", "idempotency_key", "reason") if isinstance(old.get(name), str)}
    values = {name: value for name, value in old.items() if name not in (COUNTERS[table], "chain_number")}
    inserted = sa.insert(reflected).values(values | changed).returning(reflected.c[COUNTERS[table]])
    return int(connection.scalar(inserted) or 0)


@on_postgres
@pytest.mark.parametrize("table", COUNTERS)
def test_numbers_go_on_behind_two_billion_in_a_database_with_rows(empty_database: str, table: str) -> None:
    command.upgrade(alembic_config(empty_database), BEFORE)
    with connect(empty_database) as connection:
        rows.insert_rows(connection, "old")
        before = rows.read_rows(connection)
        last = sa.text(f"SELECT setval(pg_get_serial_sequence('{table}', '{COUNTERS[table]}'), {LAST_INT})")
        connection.execute(last)
    with pytest.raises(DBAPIError, match="reached maximum value of sequence"), connect(empty_database) as connection:
        add_row(connection, table)
    upgrade(empty_database)
    with connect(empty_database) as connection:
        assert rows.find_lost_rows(before, rows.read_rows(connection)) == []
        assert add_row(connection, table) == LAST_INT + 1
        if table == "feedback":
            for holder, column in (("feedback_ranks", "feedback_seq"), ("rewards", "feedback_seq")):
                connection.execute(sa.text(f"UPDATE {holder} SET {column} = {LAST_INT + 1}"))


def test_every_column_of_such_numbers_has_64_bits() -> None:
    columns = [column for table in Base.metadata.sorted_tables for column in table.columns]
    counters = [column for column in columns if column is column.table.autoincrement_column]
    holders = [column for column in columns if column.name.endswith(HOLDERS)]
    assert {column.table.name for column in counters} == COUNTERS.keys() | {"line_moves"}  # which always had them
    assert len(holders) >= 10
    dialect = postgresql.dialect()
    narrow = {str(column) for column in {*counters, *holders} if column.type.compile(dialect) != "BIGINT"}
    assert narrow == set()


@on_postgres
def test_counters_of_the_database_have_64_bits(empty_database: str) -> None:
    """A column that counts up has a sequence with a type of its own."""
    upgrade(empty_database)
    with connect(empty_database) as connection:
        narrow = "SELECT sequencename FROM pg_sequences WHERE data_type::text <> 'bigint'"
        assert list(connection.scalars(sa.text(narrow))) == []
