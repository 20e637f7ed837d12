"""Restore the copy of a database into an empty one. Nothing starts on it before the restore has ended."""

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect, make_url, text
from sqlalchemy.exc import OperationalError

from app.core.migrate import alembic_config
from app.core.sqlite_database import make_file_private
from app.models import EngineState, WebhookEndpoint
from app.ops.backup_connections import (
    closing_engine,
    connect_postgres,
    connect_sqlite,
    is_sqlite,
    one_line,
    require_program,
    run_program,
    sqlite_path,
)
from app.ops.backup_database import REVISION_TABLE, count_rows, has_pruned_at
from app.ops.backup_manifest import Artifact, BackupError, Contents, Report

RESTORE_TABLE = "attune_restore"  # exists in a PostgreSQL database while it is restored
RESTORED = "restored from a backup; its supervisor has not started"
WEBHOOK_RESTORED = "it was restored from a backup, beside which the original may still send events"


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
    restored = count_rows(connection)
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
