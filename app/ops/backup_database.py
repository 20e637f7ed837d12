"""One consistent copy of the database in a file while the service runs, and the way back.

SQLite: the online backup API, on a connection that holds a read transaction, so that every page is of one moment and
writers neither wait nor make the copy begin again. PostgreSQL: `pg_dump` on an exported snapshot; what the manifest
states is read in the same snapshot.
"""

import os
import re
import shutil
import sqlite3
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, create_engine, inspect, make_url, select, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import OperationalError

from app.core import db_timeouts
from app.core.encryption import key_id_of
from app.core.migrate import alembic_config
from app.core.sqlite_database import make_file_private
from app.models import (
    PENDING_RELEASE,
    Batch,
    BatchState,
    Deployment,
    EngineState,
    Pin,
    Policy,
    RewardModel,
    RewardModelState,
    Version,
    WebhookEndpoint,
)
from app.ops.backup_manifest import Artifact, BackupError, Contents, Report

SQLITE_FILE, POSTGRES_FILE = "attune.db", "attune.dump"
REVISION_TABLE = "alembic_version"
RESTORE_TABLE = "attune_restore"  # exists in a PostgreSQL database while it is restored
PAGES_PER_STEP = 2500  # about 10 MB; progress is reported in between
POLL_SECONDS = 0.2
RESTORED = "restored from a backup; its supervisor has not started"
WEBHOOK_RESTORED = "it was restored from a backup, beside which the original may still send events"


def is_sqlite(url: str) -> bool:
    return url.startswith("sqlite")


def sqlite_path(url: str) -> Path:
    """Return the file of an SQLite database."""
    path = make_url(url).database
    if path is None or path == ":memory:" or path.startswith("file:"):
        raise BackupError("an SQLite database must be a file to be backed up or restored")
    return Path(path)


def copy_database(url: str, folder: Path, report: Report) -> tuple[str, Contents]:
    """Copy the database into `folder`. Returns the name of the file, and what it holds."""
    return _copy_sqlite(url, folder, report) if is_sqlite(url) else _copy_postgres(url, folder, report)


def _copy_sqlite(url: str, folder: Path, report: Report) -> tuple[str, Contents]:
    source, target = sqlite_path(url), folder / SQLITE_FILE
    if not source.exists():
        raise BackupError(f"there is no database at {source}")
    make_file_private(target)

    def progress(status: int, remaining: int, total: int) -> None:
        report("database", (total - remaining) * page_size, total * page_size)

    with (
        closing(sqlite3.connect(source, timeout=15, isolation_level=None)) as live,
        closing(sqlite3.connect(target)) as copy,
    ):
        page_size = live.execute("PRAGMA page_size").fetchone()[0]
        live.execute("BEGIN")
        live.execute("SELECT count(*) FROM sqlite_master").fetchone()  # the snapshot begins with the first read
        live.backup(copy, pages=PAGES_PER_STEP, progress=progress)
        copy.execute("PRAGMA journal_mode=DELETE")  # one file, which can be read without writing beside it
    with open_sqlite_copy(target) as connection:
        damage = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one()
        if damage != "ok":
            raise BackupError(f"the database is damaged: {damage}")
        return SQLITE_FILE, read_contents(connection)


@contextmanager
def open_sqlite_copy(path: Path) -> Iterator[Connection]:
    """Open a copy for reading, without creating a file beside it."""
    query = {"mode": "ro", "immutable": "1", "uri": "true"}
    engine = create_engine(URL.create("sqlite", database=f"file:{quote(str(path))}", query=query))
    with closing_engine(engine), engine.connect() as connection:
        yield connection


@contextmanager
def closing_engine(engine: Engine) -> Iterator[None]:
    try:
        yield
    finally:
        engine.dispose()


def _copy_postgres(url: str, folder: Path, report: Report) -> tuple[str, Contents]:
    program = require_program("pg_dump")
    target = folder / POSTGRES_FILE
    make_file_private(target)
    engine = connect_postgres(url)
    with closing_engine(engine), engine.connect() as connection:
        connection = connection.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
        connection.execute(text("SET idle_in_transaction_session_timeout = 0"))  # the dump may take long
        snapshot = connection.execute(text("SELECT pg_export_snapshot()")).scalar_one()
        contents = read_contents(connection)
        options = ["--format=custom", "--no-owner", "--no-privileges", f"--snapshot={snapshot}", f"--file={target}"]
        run_program([program, *options], make_url(url), lambda: report("database", target.stat().st_size, None))
    return POSTGRES_FILE, contents


def connect_sqlite(path: Path) -> Engine:
    """Return an engine of the file."""
    return create_engine(URL.create("sqlite", database=str(path)))


def connect_postgres(url: str) -> Engine:
    """Return an engine whose statements have no limit."""
    return create_engine(url, connect_args=db_timeouts.connect_arguments(make_url(url), None), hide_parameters=True)


def require_program(name: str) -> str:
    """Return the path of a client program of PostgreSQL."""
    path = shutil.which(name)
    if path is None:
        raise BackupError(
            f"{name} is not installed here. Backups of PostgreSQL need its client programs, of the server's major "
            "version or a later one (Debian and Ubuntu: apt install postgresql-client)"
        )
    return path


def run_program(command: list[str], url: URL, poll: Callable[[], None]) -> None:
    """Run a client program on the database. The password goes through the environment, which other users cannot see."""
    from psycopg.conninfo import make_conninfo  # an optional dependency

    _, parameters = url.get_dialect()().create_connect_args(url)  # as the service connects, also to several hosts
    if "sslpassword" in parameters:
        raise BackupError("ATTUNE_DATABASE__URL holds sslpassword, which other users could see: use a key without one")
    password = parameters.pop("password", None)
    environment = {**os.environ, **({"PGPASSWORD": str(password)} if password is not None else {})}
    process = subprocess.Popen(
        [*command, f"--dbname={make_conninfo(**parameters)}"],
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        env=environment,
        text=True,
    )
    try:
        while True:
            try:
                _, errors = process.communicate(timeout=POLL_SECONDS)
                break
            except subprocess.TimeoutExpired:
                poll()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if process.returncode != 0:
        message = one_line(errors[max(errors.find("error:"), 0) :])  # warnings may come before
        raise BackupError(f"{Path(command[0]).name} failed: {message[:500]}")


def one_line(error: object) -> str:
    """Return the text of an error without line breaks. Of SQLAlchemy's errors it is that of the driver."""
    return " ".join(str(getattr(error, "orig", None) or error).split())


def read_contents(connection: Connection) -> Contents:
    """Return what the database holds, as this transaction sees it."""
    revision = None
    if REVISION_TABLE in inspect(connection).get_table_names():
        revision = connection.scalar(text(f"SELECT version_num FROM {REVISION_TABLE}"))
    if revision is None:
        raise BackupError("there is nothing to back up: the database is empty, or its restore has not ended")
    return Contents(
        schema_revision=revision,
        rows=_count_rows(connection),
        base_models=sorted(connection.scalars(select(Policy.base_model).distinct())),
        artifacts=_read_artifacts(connection),
        webhook_secrets=_count_secrets(connection),
    )


def _count_secrets(connection: Connection) -> dict[str, int]:
    """Return the number of the webhooks' signing secrets by the name of their key."""
    if WebhookEndpoint.__tablename__ not in inspect(connection).get_table_names():  # older schemas lack it
        return {}
    rows = connection.execute(select(WebhookEndpoint.secret, WebhookEndpoint.previous_secret))
    return dict(Counter(key_id_of(stored) for row in rows for stored in row if stored is not None))


def _count_rows(connection: Connection) -> dict[str, int]:
    """Return the number of rows of each table, whatever release made the schema."""
    return {
        table: connection.execute(text(f'SELECT count(*) FROM "{table}"')).scalar_one()
        for table in sorted(inspect(connection).get_table_names())
        if table != REVISION_TABLE
    }


def has_pruned_at(connection: Connection) -> bool:
    """Return whether versions have the column `pruned_at`, which schemas of older releases lack."""
    return any(column["name"] == "pruned_at" for column in inspect(connection).get_columns("versions"))


def _read_artifacts(connection: Connection) -> list[Artifact]:
    in_use = {
        id
        for column in (
            select(Deployment.version_id),
            select(Deployment.previous_version_id),
            select(Deployment.canary_version_id),
            select(Policy.head_version_id),
            select(Pin.version_id),
            select(Version.id).where(Version.state.in_(PENDING_RELEASE)),
            select(Batch.parent_id).where(Batch.state == BatchState.OPEN),
        )
        for id in connection.scalars(column)
    }
    has_files = [Version.adapter_path.is_not(None)]
    if has_pruned_at(connection):
        has_files.append(Version.pruned_at.is_(None))
    versions = connection.execute(
        select(Version.id, Version.adapter_name, Version.adapter_path, Version.manifest_sha256)
        .where(*has_files)
        .order_by(Version.adapter_name)
    )
    models = connection.execute(
        select(RewardModel.id, RewardModel.number, RewardModel.path, RewardModel.manifest_sha256, RewardModel.state)
        .where(RewardModel.path.is_not(None))
        .order_by(RewardModel.id)
    )
    return [
        *(
            Artifact(kind="version", id=id, name=name, source=path, manifest_sha256=sha256, in_use=id in in_use)
            for id, name, path, sha256 in versions
        ),
        *(
            Artifact(
                kind="reward_model",
                id=id,
                name=f"rm-{number}",
                source=path,
                manifest_sha256=sha256,
                in_use=state == RewardModelState.SERVING,
            )
            for id, number, path, sha256, state in models
        ),
    ]


def read_live_contents(url: str) -> Contents:
    """Return what the database holds now."""
    engine = connect_sqlite(sqlite_path(url)) if is_sqlite(url) else connect_postgres(url)
    with closing_engine(engine), engine.connect() as connection:
        return read_contents(connection)


def require_known_revision(revision: str, url: str) -> None:
    """Raise BackupError for a schema of a later release."""
    known = {script.revision for script in ScriptDirectory.from_config(alembic_config(url)).walk_revisions()}
    if revision not in known:
        raise BackupError(f"the backup has the schema {revision} of a later release: install that release first")


def require_empty_database(url: str) -> None:
    """Raise BackupError unless the database has no table; an SQLite database must not exist.

    The tables of a PostgreSQL restore that did not end do not count: `restore_database` replaces them.
    """
    if is_sqlite(url):
        if sqlite_path(url).exists():
            raise BackupError(f"{sqlite_path(url)} exists: restore into an empty ATTUNE_HOME")
        return
    engine = connect_postgres(url)
    try:
        with closing_engine(engine), engine.connect() as connection:
            tables = inspect(connection).get_table_names()
            is_unfinished = _is_unfinished(connection)
    except OperationalError as error:
        raise BackupError(f"the database cannot be reached: {one_line(error)}; check ATTUNE_DATABASE__URL") from error
    if tables and not is_unfinished:
        raise BackupError(f"the database has {len(tables)} tables: restore into an empty database")


def _is_unfinished(connection: Connection) -> bool:
    """Return whether a restore that did not end has left the tables, and nothing was started on them since."""
    tables = inspect(connection).get_table_names()
    if RESTORE_TABLE not in tables:
        return False
    return REVISION_TABLE not in tables or connection.scalar(text(f"SELECT 1 FROM {REVISION_TABLE}")) is None


def restore_database(
    url: str, file: Path, contents: Contents, home: Path, absent: Collection[str], report: Report
) -> None:
    """Restore the database from `file`. It has no schema revision, and nothing starts on it, until it is adapted.

    Args:
        contents: what the backup's manifest states.
        home: the folder that the artifacts were restored into.
        absent: the paths of the artifacts that the backup does not hold.
    """
    if is_sqlite(url):
        final = sqlite_path(url)
        target = final.with_name(f"{final.name}.restoring")
        target.unlink(missing_ok=True)
        make_file_private(target)
        shutil.copyfile(file, target)
        engine = connect_sqlite(target)
    else:
        _restore_tables(url, file, report)
        engine = connect_postgres(url)
    with closing_engine(engine):
        try:
            with engine.begin() as connection:
                connection.execute(text(f"DROP TABLE IF EXISTS {RESTORE_TABLE}"))
                _adapt_rows(connection, contents.artifacts, home, absent)
                _require_rows(connection, contents.rows)
                connection.execute(text(f"DELETE FROM {REVISION_TABLE}"))
                revision = {"revision": contents.schema_revision}
                connection.execute(text(f"INSERT INTO {REVISION_TABLE} VALUES (:revision)"), revision)
        except Exception as error:
            raise BackupError(
                f"the restored database could not be adapted: {one_line(error)}; nothing starts on it: restore again"
            ) from error
    if is_sqlite(url):
        os.rename(target, final)


def _restore_tables(url: str, file: Path, report: Report) -> None:
    """Restore all tables with `pg_restore`. The schema revision stays away, so that nothing starts on them."""
    program, began = require_program("pg_restore"), time.monotonic()
    engine = connect_postgres(url)
    with closing_engine(engine), engine.begin() as connection:
        is_repeated = _is_unfinished(connection)
        connection.execute(text(f"CREATE TABLE IF NOT EXISTS {RESTORE_TABLE} (began_at float)"))
    listed = subprocess.run([program, "--list", str(file)], capture_output=True, text=True)
    if listed.returncode != 0:
        raise BackupError(f"pg_restore cannot read {file}: {one_line(listed.stderr)}")
    with tempfile.NamedTemporaryFile("w", prefix="attune-restore-") as items:
        is_revision = re.compile(rf"TABLE DATA \S+ {REVISION_TABLE} ").search
        items.writelines(f"{line}\n" for line in listed.stdout.splitlines() if not is_revision(line))
        items.flush()
        options = ["--no-owner", "--no-privileges", "--single-transaction", "--exit-on-error"]
        replace = ["--clean", "--if-exists"] if is_repeated else []
        run_program(
            [program, *options, *replace, f"--use-list={items.name}", str(file)],
            make_url(url),
            lambda: report(f"database, {time.monotonic() - began:.0f} s", 0, None),
        )


def _require_rows(connection: Connection, rows: dict[str, int]) -> None:
    restored = _count_rows(connection)
    differing = sorted(name for name in restored.keys() | rows.keys() if restored.get(name) != rows.get(name))
    if differing:
        raise BackupError(f"the restored tables {', '.join(differing)} have other numbers of rows than the manifest")


def _adapt_rows(connection: Connection, artifacts: list[Artifact], home: Path, absent: Collection[str]) -> None:
    """Point versions and reward models to their new folders, forget the engines, and disable the webhook endpoints.

    Requests would otherwise be sent to engines that may still serve their own deployment, and events a second time.
    Versions and reward models that are not in use and have no files in the backup count as deleted.
    """
    for kind, table, column in (("version", "versions", "adapter_path"), ("reward_model", "reward_models", "path")):
        rows = [{"id": one.id, "path": str(home / one.path)} for one in artifacts if one.kind == kind]
        if rows:
            connection.execute(text(f"UPDATE {table} SET {column} = :path WHERE id = :id"), rows)
    unused = [one for one in artifacts if one.path in absent and not one.in_use]
    for one in unused:
        if one.kind == "reward_model":
            connection.execute(text("UPDATE reward_models SET path = NULL WHERE id = :id"), {"id": one.id})
        elif has_pruned_at(connection):
            values = {"id": one.id, "now": time.time()}
            connection.execute(text("UPDATE versions SET pruned_at = :now WHERE id = :id"), values)
    connection.execute(
        text(
            "UPDATE engines SET state = :state, reason = :reason, loaded = '[]', weights = NULL, "
            "heartbeat_at = NULL, swapping_until = NULL"
        ),
        {"state": EngineState.DOWN, "reason": RESTORED},
    )
    if WebhookEndpoint.__tablename__ in inspect(connection).get_table_names():  # older schemas lack it
        connection.execute(
            text(
                "UPDATE webhook_endpoints SET disabled_at = :now, disabled_reason = :reason WHERE disabled_at IS NULL"
            ),
            {"now": time.time(), "reason": WEBHOOK_RESTORED},
        )
