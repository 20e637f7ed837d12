"""One consistent copy of the database in a file while the service runs, and what it holds.

SQLite: the online backup API, on a connection that holds a read transaction, so that every page is of one moment and
writers neither wait nor make the copy begin again. PostgreSQL: `pg_dump` on an exported snapshot; what the manifest
states is read in the same snapshot.
"""

import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

from sqlalchemy import Connection, inspect, make_url, select, text

from app.core.encryption import key_id_of
from app.core.sqlite_database import make_file_private
from app.models import (
    PENDING_RELEASE,
    Batch,
    BatchState,
    Deployment,
    Pin,
    Policy,
    RewardModel,
    RewardModelState,
    Version,
    WebhookEndpoint,
)
from app.ops.backup_connections import (
    closing_engine,
    connect_postgres,
    connect_sqlite,
    is_sqlite,
    open_sqlite_copy,
    require_program,
    run_program,
    sqlite_path,
)
from app.ops.backup_manifest import Artifact, BackupError, Contents, Report

SQLITE_FILE, POSTGRES_FILE = "attune.db", "attune.dump"
REVISION_TABLE = "alembic_version"
PAGES_PER_STEP = 2500  # about 10 MB; progress is reported in between


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


def read_contents(connection: Connection) -> Contents:
    """Return what the database holds, as this transaction sees it."""
    revision = None
    if REVISION_TABLE in inspect(connection).get_table_names():
        revision = connection.scalar(text(f"SELECT version_num FROM {REVISION_TABLE}"))
    if revision is None:
        raise BackupError("there is nothing to back up: the database is empty, or its restore has not ended")
    return Contents(
        schema_revision=revision,
        rows=count_rows(connection),
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


def count_rows(connection: Connection) -> dict[str, int]:
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
