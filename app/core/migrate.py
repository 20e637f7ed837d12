"""Alembic migrations of the database."""

import logging
import time
from collections.abc import Callable

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy.exc import DBAPIError

from app.core.schema_version import check_schema, is_of_newer_release
from app.core.settings import REPOSITORY

log = logging.getLogger("attune.migrate")
# A statement that waits for a table's exclusive lock makes all later statements on the table wait, too. So it waits for
# a short time only, less than the second after which PostgreSQL looks for deadlocks and might end a chat's transaction.
LOCK_SECONDS = 0.5
LOCK_ATTEMPTS = 20
MAX_PAUSE_SECONDS = 5.0
LOCK_STATES = ("55P03", "40P01")  # SQLSTATE: the lock did not come in time; a deadlock


def alembic_config(url: str) -> Config:
    """Return Alembic's configuration for the database at `url`."""
    config = Config(attributes={"url": url})
    # Alembic keeps options in a ConfigParser, which would interpolate a "%" of the path.
    config.set_main_option("script_location", str(REPOSITORY / "migrations").replace("%", "%%"))
    return config


def newest_revision() -> str:
    """Return the schema that this release creates."""
    return str(ScriptDirectory(str(REPOSITORY / "migrations")).get_current_head())


def require_compatible_schema(url: str) -> None:
    """Raise ValueError, which says what to do, if this release cannot run on the database at `url`."""
    check_schema(url, ScriptDirectory.from_config(alembic_config(url)))


def upgrade(url: str, attempts: int = LOCK_ATTEMPTS) -> None:
    """Run every missing migration. Starts an event loop of its own, so it must be called outside of one.

    A migration that cannot lock its tables has changed nothing and is tried again. Raises TimeoutError after so many
    attempts, and ValueError for the schema of a newer release on which this one cannot run.
    """
    if is_of_newer_release(url, ScriptDirectory.from_config(alembic_config(url))):
        log.info("the schema is that of a newer release, on which this one runs: nothing to do")
        return
    _try(lambda: command.upgrade(alembic_config(url), "head"), attempts)


def downgrade(url: str, revision: str, attempts: int = LOCK_ATTEMPTS) -> None:
    """Take back the migrations after `revision`, as `upgrade` runs them. Raises ValueError for an unknown revision."""
    known = [script.revision for script in ScriptDirectory.from_config(alembic_config(url)).walk_revisions()]
    if revision not in known:
        raise ValueError(f"there is no migration '{revision}'; this release has {', '.join(reversed(known))}")
    _try(lambda: command.downgrade(alembic_config(url), revision), attempts)


def _try(migrate: Callable[[], None], attempts: int) -> None:
    for attempt in range(1, attempts + 1):
        try:
            migrate()
            return
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) not in LOCK_STATES:
                raise
            if attempt == attempts:
                raise TimeoutError(
                    f"a migration could not lock its tables in {attempts} attempts of {LOCK_SECONDS:g} s, and has "
                    "changed nothing: end the long transactions (pg_stat_activity), then run the same command again"
                ) from error
            log.warning("attempt %d of %d: a migration could not lock its tables", attempt, attempts)
        time.sleep(min(0.5 * attempt, MAX_PAUSE_SECONDS))
