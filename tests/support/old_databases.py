"""PostgreSQL databases that killed test runs have left: `attune_` and twelve hexadecimal digits, older than a day."""

from contextlib import suppress

import psycopg
from psycopg import errors, sql

MAX_AGE_SECONDS = 86400.0
OLD_DATABASES = """
SELECT datname FROM pg_database
WHERE datname ~ '^attune_[0-9a-f]{12}$'
  AND (pg_stat_file('base/' || oid || '/PG_VERSION', true)).modification < now() - make_interval(secs => %s)
ORDER BY datname
"""


def find_old_databases(server: psycopg.Connection, max_age_seconds: float = MAX_AGE_SECONDS) -> list[str]:
    """Return the names of old databases of test runs; none if the role may not ask how old they are."""
    try:
        return [name for (name,) in server.execute(OLD_DATABASES, [max_age_seconds]).fetchall()]
    except errors.InsufficientPrivilege:
        return []


def drop_databases(server: psycopg.Connection, names: list[str]) -> None:
    """Drop the databases that nobody is connected to. Another run may drop them at the same time."""
    for name in names:
        with suppress(errors.ObjectInUse, errors.InvalidCatalogName):
            server.execute(sql.SQL("DROP DATABASE IF EXISTS {}").format(sql.Identifier(name)))
