"""The SQL of older code runs on the newest schema if it admits this code, so that two releases can run side by side.

A migration never changes once it is released, so the schemas before the newest one were tested when they were new.
"""

from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.script import ScriptDirectory
from sqlalchemy.exc import DBAPIError

from app.core.migrate import alembic_config
from app.core.schema_version import oldest_code
from tests.migrations import rows
from tests.migrations.extra import NewerRelease
from tests.migrations.test_migrations import REVISIONS, connect

APPEND_ONLY = ("audit",)


def find_problem(connection: sa.Connection, tables: list[sa.Table]) -> str | None:
    """Return why the statements of code that knows `tables` fail on the present schema, or None. Changes nothing."""
    inspector = sa.inspect(connection)
    for table in tables:
        if not inspector.has_table(table.name):
            return f"{table.name} is missing"
        if new := unique_columns(inspector, table) - unique_columns_of(table):
            return f"{table.name} has new unique columns: {new}"
    transaction = connection.begin_nested()
    try:
        rows.insert_rows(connection, "old", tables)
        for table in tables:
            connection.execute(sa.select(table)).all()
            if table.name not in APPEND_ONLY:
                connection.execute(sa.update(table).values({column.name: column for column in table.columns}))
        for table in reversed(tables):
            if table.name not in APPEND_ONLY:
                connection.execute(sa.delete(table))
    except DBAPIError as error:
        return str(error.orig)
    finally:
        transaction.rollback()
    return None


def unique_columns(inspector: sa.Inspector, table: sa.Table) -> set[tuple[str | None, ...]]:
    """Return the sets of columns that must be unique now and that code which knows `table` writes."""
    found: list[list[str | None]] = []
    found += [list(one["column_names"]) for one in inspector.get_unique_constraints(table.name)]
    found += [one["column_names"] for one in inspector.get_indexes(table.name) if one["unique"]]
    known = {column.name for column in table.columns}
    return {tuple(names) for names in found if known.issuperset(names)}


def unique_columns_of(table: sa.Table) -> set[tuple[str | None, ...]]:
    constraints = [one.columns.keys() for one in table.constraints if isinstance(one, sa.UniqueConstraint)]
    return {tuple(names) for names in (*constraints, *(one.columns.keys() for one in table.indexes if one.unique))}


def test_statements_of_older_code_run_on_the_newest_schema_if_it_admits_them(empty_database: str) -> None:
    config = alembic_config(empty_database)
    scripts = ScriptDirectory.from_config(config)
    schemas: dict[str, list[sa.Table]] = {}
    admitted = REVISIONS[REVISIONS.index(oldest_code(scripts, REVISIONS[-1])) : -1]
    for revision in admitted:
        command.upgrade(config, revision)
        with connect(empty_database) as connection:
            schemas[revision] = rows.reflect_tables(connection)
    command.upgrade(config, "head")
    with connect(empty_database) as connection:
        for older in admitted:
            problem = find_problem(connection, schemas[older])
            assert problem is None, f"code of {older} on schema {REVISIONS[-1]}: {problem}; name it in `oldest_code`"


@pytest.mark.parametrize(
    "upgrade",
    [
        'op.add_column("projects", sa.Column("plan", sa.String(20), nullable=False, server_default="free"))\n'
        '    op.alter_column("projects", "plan", server_default=None)',
        'op.drop_column("projects", "token_secret")',
        'op.rename_table("rollouts", "planned_rollouts")',
        'op.create_index("uq_projects_train", "projects", ["train"], unique=True)',
    ],
    ids=["column without default", "dropped column", "renamed table", "unique index"],
)
def test_migrations_that_break_older_code_are_found(empty_database: str, tmp_path: Path, upgrade: str) -> None:
    newer = NewerRelease(empty_database, tmp_path / "versions")
    if "alter_column" in upgrade and empty_database.startswith("sqlite"):
        upgrade = 'op.execute("ALTER TABLE projects ADD COLUMN plan VARCHAR CHECK (plan IS NOT NULL)")'
    newer.upgrade()
    with connect(empty_database) as connection:
        tables = rows.reflect_tables(connection)
        assert find_problem(connection, tables) is None
    newer.add(upgrade)
    newer.upgrade()
    with connect(empty_database) as connection:
        assert find_problem(connection, tables) is not None
