"""Runs the migrations on the configured database, or on the URL that the caller sets."""

import asyncio

from alembic import context
from sqlalchemy.engine import Connection

from app.core.database import Database
from app.core.settings import get_settings
from app.models import Base


def migrate(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        render_as_batch=connection.dialect.name == "sqlite",
        compare_type=True,
    )
    with context.begin_transaction():
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql(
                "SELECT pg_advisory_xact_lock(20261121)"
            )  # several processes may start at the same time
            connection.exec_driver_sql("SET LOCAL lock_timeout = '5s'")
        context.run_migrations()


async def run_migrations() -> None:
    url = context.config.attributes.get("url") or get_settings().database
    db = Database(url, seconds=None)  # a migration may take long
    async with db.engine.connect() as connection:
        await connection.run_sync(migrate)
        await connection.commit()
    await db.close()


asyncio.run(run_migrations())
