"""Every migration runs up and down over data on both databases, and ends at the schema of the models."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.script import ScriptDirectory

from app.core.migrate import alembic_config
from app.models import Base
from tests.migrations import rows

REVISIONS = [script.revision for script in ScriptDirectory.from_config(alembic_config("sqlite://")).walk_revisions()][
    ::-1
]


@contextmanager
def connect(url: str) -> Iterator[sa.Connection]:
    """Connect without app.core.database: a migration must not depend on its engine."""
    engine = sa.create_engine(url.replace("+aiosqlite", ""))
    with engine.begin() as connection:
        yield connection
    engine.dispose()


def read_state(url: str) -> rows.Rows:
    with connect(url) as connection:
        return read_all(connection, rows.reflect_tables(connection))


def read_all(connection: sa.Connection, tables: list[sa.Table]) -> rows.Rows:
    if connection.dialect.name == "sqlite":
        assert connection.exec_driver_sql("PRAGMA foreign_key_check").all() == []
    return rows.read_rows(connection, tables)


class MigrationRun:
    """Migrates one revision at a time; each step starts with rows that were inserted at every revision so far."""

    def __init__(self, url: str) -> None:
        self.url, self.config = url, alembic_config(url)
        self.state: rows.Rows = {}

    def up(self) -> None:
        for number, revision in enumerate(REVISIONS):
            command.upgrade(self.config, revision)
            with connect(self.url) as connection:
                tables = rows.reflect_tables(connection)
                lost = rows.find_lost_rows(self.state, read_all(connection, tables))
                assert lost == [], f"upgrade to {revision}"
                rows.insert_rows(connection, f"m{number}", tables)
                self.state = read_all(connection, tables)

    def down(self) -> None:
        for target in reversed(["base", *REVISIONS[:-1]]):
            command.downgrade(self.config, target)
            state = read_state(self.url)
            assert rows.find_lost_rows(self.state, state) == [], f"downgrade to {target}"
            self.state = state


def test_upgrade_downgrade_upgrade_keeps_data(empty_database: str) -> None:
    run = MigrationRun(empty_database)
    run.up()
    assert all(len(rows) >= 1 for rows in run.state.values())
    assert len(run.state["turns"]) == len(REVISIONS)
    run.down()
    assert run.state == {}
    command.upgrade(run.config, "head")
    command.check(run.config)


def test_migrations_create_the_schema_of_the_models(empty_database: str) -> None:
    config = alembic_config(empty_database)
    command.upgrade(config, "head")
    command.check(config)
    with connect(empty_database) as connection:
        assert {table.name for table in rows.reflect_tables(connection)} == set(Base.metadata.tables)


def test_failed_migration_leaves_the_schema_unchanged(empty_database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = alembic_config(empty_database)
    before = read_state(empty_database)

    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("the machine went down")

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="went down"):
        patched.setattr("alembic.op.create_index", fail)
        command.upgrade(config, "head")
    assert read_state(empty_database) == before
    command.upgrade(config, "head")
    command.check(config)


def schema_shape(connection: sa.Connection) -> dict[str, Any]:
    inspector = sa.inspect(connection)
    return {name: table_shape(inspector, name) for name in inspector.get_table_names()}


def table_shape(inspector: sa.Inspector, name: str) -> dict[str, Any]:
    own = [index for index in inspector.get_indexes(name) if "duplicates_constraint" not in index]
    return {
        "columns": {c["name"]: (type_family(c["type"]), c["nullable"]) for c in inspector.get_columns(name)},
        "primary key": inspector.get_pk_constraint(name)["constrained_columns"],
        "foreign keys": sorted(
            (
                key["name"],
                key["constrained_columns"],
                key["referred_table"],
                key["referred_columns"],
                key["options"].get("ondelete"),
            )
            for key in inspector.get_foreign_keys(name)
        ),
        "unique": sorted((one["name"], one["column_names"]) for one in inspector.get_unique_constraints(name)),
        "indexes": sorted((index["name"], index["column_names"], bool(index["unique"])) for index in own),
    }


def type_family(kind: sa.types.TypeEngine[Any]) -> tuple[str, int | None]:
    for wide in (sa.JSON, sa.Text, sa.String, sa.Boolean, sa.Integer, sa.Float, sa.LargeBinary):
        if isinstance(kind, wide):
            return wide.__name__, getattr(kind, "length", None)
    raise AssertionError(f"a column of type {kind!r}")


@pytest.mark.postgres
def test_both_databases_have_the_same_schema(blank_sqlite: Path, postgres: str) -> None:
    with connect(f"sqlite:///{blank_sqlite}") as one, connect(postgres) as other:
        embedded, server = schema_shape(one), schema_shape(other)
    assert embedded.keys() == server.keys()
    for name in embedded:
        assert embedded[name] == server[name], name
