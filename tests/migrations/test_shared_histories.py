"""Without shared histories, every turn stores its whole prompt: the downgrade completes those that refer to others."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from sqlalchemy.exc import SQLAlchemyError

from app.chat import histories
from app.core.migrate import alembic_config
from app.models import Turn
from tests.migrations import rows
from tests.migrations.test_migrations import connect

BEFORE = "20261123_0800"
NUM_CHOICES = 150  # more than a batch
Prompts = dict[str, tuple[Any, list[int] | None]]


def message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def insert_turns(connection: sa.Connection) -> None:
    """Insert a chain whose ids are not in its order: z, then b and 150 choices, then y and a, then x without tokens."""
    tables = rows.reflect_tables(connection)
    rows.insert_rows(connection, "m", tables[: [table.name for table in tables].index("turns") + 1])
    row = dict(connection.execute(sa.select(Turn.__table__)).mappings().one())
    connection.execute(sa.delete(Turn))
    row |= {"history_id": None, "num_history_messages": 0, "num_history_tokens": 0, "deleted_at": None}

    def insert(id: str, texts: list[str], ids: list[int] | None, history: tuple[str, int, int] | None = None) -> None:
        shared = dict(zip(("history_id", "num_history_messages", "num_history_tokens"), history or (), strict=False))
        own = {"own_messages": [message(text) for text in texts], "own_prompt_ids": ids, "reply": message(f"re {id}")}
        output = {"output_ids": None if ids is None else [100, 2**31 - 1], "completion_id": id}
        connection.execute(sa.insert(Turn), row | {"id": id} | shared | own | output)

    insert("z", ["be brief", "hello"], [1, 2, 3])
    insert("b", ["more ☃"], [4], ("z", 3, 5))
    for number in range(NUM_CHOICES):
        insert(f"choice-{number:03}", [], [], ("z", 2, 3))
    insert("y", ["and more"], [5, 6], ("b", 5, 8))
    insert("a", ["edited"], [7], ("b", 4, 6))  # without the reply of b
    insert("x", ["no tokens"], None, ("y", 7, 0))


def read_prompts(url: str) -> Prompts:
    """Return the prompts as this release reads them."""
    with connect(url) as connection:
        ids = list(connection.scalars(sa.select(Turn.id)))
        return {id: histories.find_prompt(connection, id) for id in ids}


def read_stored(url: str) -> Prompts:
    """Return what each turn stores itself, which a release without histories takes for the prompt."""
    with connect(url) as connection:
        stored = connection.execute(sa.select(Turn.id, Turn.own_messages, Turn.own_prompt_ids))
        return {id: (messages, tokens) for id, messages, tokens in stored}


@pytest.fixture
def config(empty_database: str) -> Config:
    """Return the configuration of a database with turns that share their histories."""
    config = alembic_config(empty_database)
    command.upgrade(config, "head")
    with connect(empty_database) as connection:
        insert_turns(connection)
    return config


def test_downgrade_stores_whole_prompts(config: Config, empty_database: str) -> None:
    before = read_prompts(empty_database)
    texts = [one["content"] for one in before["y"][0]]
    assert texts == ["be brief", "hello", "re z", "more ☃", "re b", "and more"]
    assert before["y"][1] == [1, 2, 3, 100, 2**31 - 1, 4, 100, 2**31 - 1, 5, 6] and before["x"][1] is None
    assert before["a"][1] == [1, 2, 3, 100, 2**31 - 1, 4, 7] and len(before) == NUM_CHOICES + 5
    command.downgrade(config, BEFORE)
    assert read_stored(empty_database) == before
    command.upgrade(config, "head")
    assert read_prompts(empty_database) == before


@contextmanager
def refused_updates(url: str, turn_id: str) -> Iterator[None]:
    """Let every update of this turn fail."""
    condition, message = f"WHEN (NEW.id = '{turn_id}')", "the machine went down"
    with connect(url) as connection:
        on_postgresql = connection.dialect.name == "postgresql"
        if on_postgresql:
            body = f"BEGIN RAISE EXCEPTION '{message}'; END"
            connection.exec_driver_sql(f"CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$ {body} $$")
        action = "EXECUTE FUNCTION fail()" if on_postgresql else f"BEGIN SELECT RAISE(ABORT, '{message}'); END"
        connection.exec_driver_sql(f"CREATE TRIGGER fail BEFORE UPDATE ON turns FOR EACH ROW {condition} {action}")
    yield
    with connect(url) as connection:
        connection.exec_driver_sql("DROP TRIGGER fail" + (" ON turns" if on_postgresql else ""))


def test_interrupted_downgrade_loses_nothing_and_continues(config: Config, empty_database: str) -> None:
    before = read_prompts(empty_database)
    with refused_updates(empty_database, "y"), pytest.raises(SQLAlchemyError, match="the machine went down"):
        command.downgrade(config, BEFORE)
    assert read_prompts(empty_database) == before
    with connect(empty_database) as connection:
        num_left = connection.scalars(sa.select(sa.func.count()).where(Turn.history_id.is_not(None))).one()
        assert connection.dialect.name == "sqlite" or num_left < NUM_CHOICES, "what was completed stays completed"
    command.downgrade(config, BEFORE)
    assert read_stored(empty_database) == before


def test_erased_turns_stay_erased_and_tokens_without_their_beginning_are_dropped(
    config: Config, empty_database: str
) -> None:
    """A release that knows no histories erases a turn's own content alone."""
    erased: dict[str, Any] = {
        "own_messages": [],
        "own_prompt_ids": None,
        "output_ids": None,
        "reply": None,
        "deleted_at": 5.0,
    }
    with connect(empty_database) as connection:
        connection.execute(sa.update(Turn).where(Turn.id.in_(["b", "choice-000"])).values(erased))
    command.downgrade(config, BEFORE)
    stored = read_stored(empty_database)
    assert stored["b"] == stored["choice-000"] == ([], None)
    assert stored["a"] == ([message("edited")], None) and stored["y"] == ([message("and more")], None)
    assert [one["content"] for one in stored["x"][0]] == ["and more", "re y", "no tokens"]
