"""What is deleted is gone from the embedded database's files too: overwritten in place, and no copy left in the WAL.

PostgreSQL keeps deleted rows until it vacuums; see docs/operating.md.
"""

from app.core.database import Database

PATIENCE_MS = 2000


async def scrub(db: Database) -> bool:
    """False when somebody reads or writes all the time, so that the WAL could not be emptied: ask again."""
    if not db.embedded:
        return True
    async with db.engine.connect() as connection:
        raw = (await connection.get_raw_connection()).driver_connection
        assert raw is not None
        before = (await (await raw.execute("PRAGMA busy_timeout")).fetchone())[0]
        try:
            await raw.execute(f"PRAGMA busy_timeout = {PATIENCE_MS}")
            busy, _, _ = await (await raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")).fetchone()
        finally:
            await raw.execute(f"PRAGMA busy_timeout = {before}")
    return not busy
