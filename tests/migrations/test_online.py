"""Migrations of a PostgreSQL database that is in use: locks, indexes and backfills."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from app.core import migrate
from tests.migrations.extra import NewerRelease, head_revision
from tests.migrations.test_migrations import connect
from tests.support.processes import wait_until

pytestmark = pytest.mark.parametrize(
    "empty_database", [pytest.param("postgres", marks=pytest.mark.postgres)], indirect=True
)
ROWS = 5000
ADD_COLUMN = 'op.add_column("projects", sa.Column("plan", sa.String(20)))'
FILL = 'online.backfill("projects", "plan = coalesce(plan, \'\') || \'x\'", "plan IS NULL", batch_rows=500)'
DELAY = """
CREATE FUNCTION delay() RETURNS trigger AS $$ BEGIN PERFORM pg_sleep(0.002); RETURN NEW; END $$ LANGUAGE plpgsql;
CREATE TRIGGER delay BEFORE UPDATE ON projects FOR EACH ROW EXECUTE FUNCTION delay()
"""


@pytest.fixture
def newer(empty_database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NewerRelease:
    """Return a release with further migrations, which `migrate.upgrade` then runs on a database at this release."""
    migrate.upgrade(empty_database)
    newer = NewerRelease(empty_database, tmp_path / "versions")
    monkeypatch.setattr(migrate, "alembic_config", newer.alembic_config)
    monkeypatch.setattr(migrate, "MAX_PAUSE_SECONDS", 0.2)
    return newer


@pytest.fixture
def long_transaction(empty_database: str) -> Iterator[sa.Connection]:
    """Yield a connection whose open transaction has read projects."""
    engine = sa.create_engine(empty_database)
    with engine.connect() as connection:
        connection.execute(sa.text("SELECT count(*) FROM projects"))
        yield connection
    engine.dispose()


@dataclass
class Requests:
    """Transactions that read and write projects one after another, as requests do."""

    done: int = 0
    errors: list[str] = field(default_factory=list)

    def wait_for_more(self) -> None:
        """Wait until further ones have ended."""
        before = self.done
        wait_until(lambda: self.errors or self.done > before + 20, 60, "requests are answered")


@contextmanager
def running_requests(url: str) -> Iterator[Requests]:
    requests, stop, engine = Requests(), threading.Event(), sa.create_engine(url)

    def run() -> None:
        while not stop.wait(0.01):
            try:
                with engine.begin() as connection:
                    connection.execute(sa.text("SELECT count(*) FROM projects"))
                    connection.execute(sa.text("UPDATE projects SET train = NOT train"))
                requests.done += 1
            except DBAPIError as error:
                requests.errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield requests
    finally:
        stop.set()
        thread.join()
        engine.dispose()


@contextmanager
def waiting_upgrade(url: str, blocker: sa.Connection, statement: str, attempts: int) -> Iterator[Future[None]]:
    """Yield an upgrade whose statement waits for another transaction. Then end that, and wait for the upgrade."""
    waiting = "SELECT query FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"

    def is_waiting() -> bool:
        with connect(url) as connection:
            return any(query.startswith(statement) for query in connection.scalars(sa.text(waiting)))

    with ThreadPoolExecutor(1) as pool:
        upgrade = pool.submit(migrate.upgrade, url, attempts)
        try:
            wait_until(lambda: upgrade.done() or is_waiting(), 60, f"{statement} waits")
            yield upgrade
        finally:
            blocker.rollback()
        upgrade.result()


def schema_of(url: str) -> tuple[str | None, set[str]]:
    with connect(url) as connection:
        columns = {column["name"] for column in sa.inspect(connection).get_columns("projects")}
        return connection.scalar(sa.text("SELECT version_num FROM alembic_version")), columns


def test_long_transaction_delays_the_upgrade_and_no_request(
    empty_database: str, newer: NewerRelease, long_transaction: sa.Connection
) -> None:
    revision = newer.add(ADD_COLUMN)
    with (
        running_requests(empty_database) as requests,
        waiting_upgrade(empty_database, long_transaction, "ALTER TABLE projects", 10_000) as upgrade,
    ):
        requests.wait_for_more()
        assert not upgrade.done(), "the long transaction has not ended"
    assert schema_of(empty_database)[0] == revision
    assert requests.errors == []


def test_upgrade_that_gets_no_lock_changes_nothing_and_says_what_to_do(
    empty_database: str, newer: NewerRelease, long_transaction: sa.Connection
) -> None:
    before = schema_of(empty_database)
    newer.add('op.create_table("plans", sa.Column("id", sa.String(20), primary_key=True))\n    ' + ADD_COLUMN)
    with pytest.raises(TimeoutError, match=r"could not lock its tables in 2 attempts .* run the same command again"):
        migrate.upgrade(empty_database, attempts=2)
    assert schema_of(empty_database) == before
    with connect(empty_database) as connection:
        assert not sa.inspect(connection).has_table("plans")


def test_finished_migrations_stay_when_a_later_one_fails(empty_database: str, newer: NewerRelease) -> None:
    revision = newer.add(ADD_COLUMN)
    newer.add('raise RuntimeError("a mistake")')
    with pytest.raises(RuntimeError, match="a mistake"):
        migrate.upgrade(empty_database)
    assert schema_of(empty_database)[0] == revision


def test_killed_backfill_continues(empty_database: str, newer: NewerRelease) -> None:
    with connect(empty_database) as connection:
        series = f"SELECT 'p' || n, 'n' || n, 0 FROM generate_series(1, {ROWS}) n"
        connection.execute(sa.text(f"INSERT INTO projects (id, name, created_at) {series}"))
        connection.execute(sa.text(DELAY))
    newer.add(ADD_COLUMN)
    newer.add(FILL)

    def kill_after_two_batches() -> None:
        while num_filled(empty_database) < 1000:
            time.sleep(0.05)
        with connect(empty_database) as connection:
            running = "datname = current_database() AND query LIKE 'UPDATE projects SET plan%'"
            ends = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {running}"
            while not connection.execute(sa.text(ends)).all():
                time.sleep(0.01)

    killer = threading.Thread(target=kill_after_two_batches)
    killer.start()
    with pytest.raises(SQLAlchemyError):
        migrate.upgrade(empty_database)
    killer.join()
    filled = num_filled(empty_database)
    assert 1000 <= filled < ROWS and schema_of(empty_database)[0] == "newer_1"
    with connect(empty_database) as connection:
        connection.execute(sa.text("DROP TRIGGER delay ON projects"))
    migrate.upgrade(empty_database)
    with connect(empty_database) as connection:
        values = connection.execute(sa.text("SELECT plan, count(*) FROM projects GROUP BY plan")).all()
    assert [tuple(row) for row in values] == [("x", ROWS)], "each row was filled once"


def num_filled(url: str) -> int:
    with connect(url) as connection:
        if "plan" not in {column["name"] for column in sa.inspect(connection).get_columns("projects")}:
            return 0
        return int(connection.scalar(sa.text("SELECT count(*) FROM projects WHERE plan IS NOT NULL")) or 0)


def test_index_that_a_killed_build_left_is_built_again(empty_database: str, newer: NewerRelease) -> None:
    newer.add(
        'online.create_index("ix_projects_train", "projects", ["train"])',
        'online.drop_index("ix_projects_train", "projects")',
    )
    with connect(empty_database) as connection:
        connection.execute(sa.text("CREATE INDEX ix_projects_train ON projects (train)"))
        invalid = "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'ix_projects_train'::regclass"
        connection.execute(sa.text(invalid))
    migrate.upgrade(empty_database)
    valid = "SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass('ix_projects_train')"
    with connect(empty_database) as connection:
        assert connection.scalar(sa.text(valid)) is True
    newer.downgrade(head_revision())
    with connect(empty_database) as connection:
        assert connection.scalar(sa.text(valid)) is None


def test_index_is_built_while_rows_are_written_and_waits_for_old_transactions(
    empty_database: str, newer: NewerRelease, long_transaction: sa.Connection
) -> None:
    """A lock timeout would end the build, because it waits for transactions that are older than it."""
    newer.add('online.create_index("ix_projects_train", "projects", ["train"])')
    long_transaction.execute(sa.text("LOCK TABLE projects IN ROW EXCLUSIVE MODE"))
    with (
        running_requests(empty_database) as requests,
        waiting_upgrade(empty_database, long_transaction, "CREATE INDEX", attempts=1) as upgrade,
    ):
        requests.wait_for_more()
        assert not upgrade.done(), "an older transaction has not ended"
    assert schema_of(empty_database)[0] == "newer_1"
    assert requests.errors == []
