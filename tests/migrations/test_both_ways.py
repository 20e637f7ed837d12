"""Every migration, up and down over data, on both databases; and both end at the schema that the models describe."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
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
def connected(url: str) -> Iterator[sa.Connection]:
    """Without the house's own engine: nothing that a migration needs may be hidden in it."""
    engine = sa.create_engine(url.replace("+aiosqlite", ""))
    with engine.begin() as connection:
        yield connection
    engine.dispose()


def state(url: str) -> rows.Rows:
    with connected(url) as connection:
        if connection.dialect.name == "sqlite":
            assert connection.exec_driver_sql("PRAGMA foreign_key_check").all() == []
        return rows.kept(connection)


def fill(url: str, mark: str) -> None:
    with connected(url) as connection:
        rows.fill(connection, mark)


class Journey:
    """Up and down one revision at a time; every step starts over data of each revision that has been seen."""

    def __init__(self, url: str) -> None:
        self.url, self.config, self.marks = url, alembic_config(url), count()

    def up(self) -> None:
        for revision in REVISIONS:
            before = state(self.url)
            command.upgrade(self.config, revision)
            assert rows.lost(before, state(self.url)) == [], f"upgrade to {revision}"
            fill(self.url, f"m{next(self.marks)}")

    def down(self) -> None:
        for target in reversed(["base", *REVISIONS[:-1]]):
            before = state(self.url)
            command.downgrade(self.config, target)
            assert rows.lost(before, state(self.url)) == [], f"downgrade to {target}"


def test_there_and_back_twice_over_data(empty: str) -> None:
    journey = Journey(empty)
    journey.up()
    assert all(len(found) >= 1 for found in state(empty).values()) and len(state(empty)["turns"]) == len(REVISIONS)
    journey.down()
    assert state(empty) == {}
    journey.up()
    command.check(journey.config)


def test_what_the_models_say_is_what_migrations_make(empty: str) -> None:
    config = alembic_config(empty)
    command.upgrade(config, "head")
    command.check(config)
    with connected(empty) as connection:
        assert {table.name for table in rows.tables(connection)} == set(Base.metadata.tables)


def test_a_failed_migration_leaves_the_schema_as_it_was(empty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = alembic_config(empty)
    before = state(empty)

    def breaks(*args: Any, **options: Any) -> None:
        raise RuntimeError("the machine went down")

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="went down"):
        patched.setattr("alembic.op.create_index", breaks)
        command.upgrade(config, "head")
    assert state(empty) == before
    command.upgrade(config, "head")
    command.check(config)


def shape(connection: sa.Connection) -> dict[str, Any]:
    inspector = sa.inspect(connection)
    return {name: table_shape(inspector, name) for name in inspector.get_table_names()}


def table_shape(inspector: sa.Inspector, name: str) -> dict[str, Any]:
    own = [index for index in inspector.get_indexes(name) if "duplicates_constraint" not in index]
    return {
        "columns": {c["name"]: (family(c["type"]), c["nullable"]) for c in inspector.get_columns(name)},
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


def family(kind: sa.types.TypeEngine[Any]) -> tuple[str, int | None]:
    for wide in (sa.JSON, sa.Text, sa.String, sa.Boolean, sa.Integer, sa.Float, sa.LargeBinary):
        if isinstance(kind, wide):
            return wide.__name__, getattr(kind, "length", None)
    raise AssertionError(f"a column of type {kind!r}")


@pytest.mark.postgres
def test_both_databases_have_the_same_schema(blank_sqlite: Path, postgres: str) -> None:
    with connected(f"sqlite:///{blank_sqlite}") as one, connected(postgres) as other:
        embedded, server = shape(one), shape(other)
    assert embedded.keys() == server.keys()
    for name in embedded:
        assert embedded[name] == server[name], name
