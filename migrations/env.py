"""Runs the migrations on the configured database, or on the URL that the caller sets.

On PostgreSQL each migration is a transaction, so that its locks are held for a short time; on SQLite all are one.
"""

import asyncio
import logging
import time
from collections.abc import Collection, Mapping
from typing import Any

from alembic import context
from alembic.runtime.migration import MigrationContext, MigrationInfo
from sqlalchemy.engine import Connection

from app.core.database import Database
from app.core.migrate import LOCK_SECONDS
from app.core.schema_version import COMPATIBILITY, record_compatibility
from app.core.settings import get_settings
from app.models import Base

UPGRADE_LOCK = 20261121
POLL_SECONDS = 0.2
REPORT_SECONDS = 5.0
log = logging.getLogger("attune.migrate")


def migrate(connection: Connection) -> None:
    on_postgresql = connection.dialect.name == "postgresql"
    if on_postgresql:
        wait_for_other_upgrades(connection)
        connection.exec_driver_sql(f"SET lock_timeout = '{LOCK_SECONDS}s'")
        connection.commit()
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        render_as_batch=not on_postgresql,
        compare_type=True,
        transactional_ddl=True,
        transaction_per_migration=on_postgresql,
        on_version_apply=record_step,
        include_name=lambda name, kind, parents: (kind, name) != ("table", COMPATIBILITY.name),
    )
    with context.begin_transaction():
        context.run_migrations()


def wait_for_other_upgrades(connection: Connection) -> None:
    """Take a lock that this connection holds until it is closed: several processes may start at the same time.

    A statement that waited for the lock would have a snapshot, for whose end the other process may wait in turn, to
    build an index. So this asks again and again.
    """
    report_at = time.monotonic() + REPORT_SECONDS
    while not connection.exec_driver_sql(f"SELECT pg_try_advisory_lock({UPGRADE_LOCK})").scalar():
        connection.rollback()
        if time.monotonic() > report_at:
            log.warning("another upgrade of this database is running; this one waits for it")
            report_at += REPORT_SECONDS
        time.sleep(POLL_SECONDS)


def record_step(
    ctx: MigrationContext, step: MigrationInfo, heads: Collection[Any], run_args: Mapping[str, Any]
) -> None:
    assert ctx.connection is not None
    record_compatibility(ctx.connection, context.script, next(iter(heads), None))


async def run_migrations() -> None:
    url = context.config.attributes.get("url") or get_settings().database_url
    # A migration may take long. Closing the connections releases the upgrade's lock, also after a failure.
    async with Database(url, seconds=None) as db, db.engine.connect() as connection:
        await connection.execution_options(attune_write=True)
        await connection.run_sync(migrate)
        await connection.commit()


asyncio.run(run_migrations())
