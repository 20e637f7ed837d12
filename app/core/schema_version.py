"""Which code runs on which schema: a process starts only on a database whose schema it can use.

Migrations expand the schema: they add tables, and columns that are nullable or have a server default. Code of the
release before runs on the result, so that `attune db upgrade` comes first and processes are replaced one by one. A
migration that takes something away names in `oldest_code` the oldest revision whose code runs on its schema; without
that it has the value of the migration before. Old code does not have the files of newer migrations, so every migration
writes this value to the table `schema_compatibility`.
"""

from pathlib import Path

from alembic.script import ScriptDirectory
from sqlalchemy import (
    Column,
    MetaData,
    NullPool,
    String,
    Table,
    create_engine,
    delete,
    insert,
    inspect,
    make_url,
    select,
)
from sqlalchemy.engine import Connection
from sqlalchemy.exc import OperationalError

from app.core import db_timeouts
from app.core.database_url import blocking_url

CONNECT_SECONDS = 5.0
UPGRADE_FIRST = "run `attune db upgrade` first"
_metadata = MetaData()  # not that of the models: the migrations themselves keep this table
COMPATIBILITY = Table(
    "schema_compatibility",
    _metadata,
    Column("revision", String(32), primary_key=True),
    Column("oldest_code", String(32), nullable=False),
)
VERSION = Table("alembic_version", _metadata, Column("version_num", String(32), primary_key=True))


def oldest_code(scripts: ScriptDirectory, revision: str) -> str:
    """Return the oldest revision whose code runs on the schema `revision`."""
    script = scripts.get_revision(revision)
    assert script is not None
    named: str | None = getattr(script.module, "oldest_code", None)
    if named is None and isinstance(script.down_revision, str):
        return oldest_code(scripts, script.down_revision)
    return named or revision


def record_compatibility(connection: Connection, scripts: ScriptDirectory, revision: str | None) -> None:
    """Write what runs on the schema `revision`, in the transaction of the migration that leads to it."""
    COMPATIBILITY.create(connection, checkfirst=True)
    connection.execute(delete(COMPATIBILITY))
    if revision is not None:
        row = {"revision": revision, "oldest_code": oldest_code(scripts, revision)}
        connection.execute(insert(COMPATIBILITY), row)


def check_schema(url: str, scripts: ScriptDirectory) -> None:
    """Raise ValueError, which says what to do, if the code of these migrations cannot run on the database at `url`."""
    revision, _ = _read_revision(url)
    if revision is None:
        raise ValueError(f"the database has no tables yet: {UPGRADE_FIRST}")
    head = scripts.get_current_head()
    if not is_of_newer_release(url, scripts) and revision != head:
        raise ValueError(f"the database has schema {revision} and this release needs {head}: {UPGRADE_FIRST}")


def is_of_newer_release(url: str, scripts: ScriptDirectory) -> bool:
    """Return whether the database at `url` has the schema of a newer release, on which this code runs.

    Raises ValueError, which says what to do, if this code cannot run on that schema.
    """
    revision, oldest = _read_revision(url)
    known = {script.revision for script in scripts.walk_revisions()}
    if revision is None or revision in known:
        return False
    if oldest not in known:
        raise ValueError(
            f"the database has schema {revision} of a newer release, on which this release "
            f"(schema {scripts.get_current_head()}) cannot run: install the newer release"
        )
    return True


def _read_revision(url: str) -> tuple[str | None, str | None]:
    """Return the revision of the schema and the oldest revision whose code runs on it; None for what is not there."""
    parsed = make_url(url)
    is_file = parsed.get_backend_name() == "sqlite"
    if is_file and not Path(parsed.database or "").exists():  # connecting would create it
        return None, None
    arguments = {} if is_file else db_timeouts.connect_arguments(parsed, CONNECT_SECONDS)
    engine = create_engine(blocking_url(url), connect_args=arguments, poolclass=NullPool)
    try:
        with engine.connect() as connection:
            tables = inspect(connection).get_table_names()
            if VERSION.name not in tables:
                return None, None
            revision = connection.scalar(select(VERSION.c.version_num))
            if COMPATIBILITY.name not in tables:
                return revision, None
            oldest = select(COMPATIBILITY.c.oldest_code).where(COMPATIBILITY.c.revision == revision)
            return revision, connection.scalar(oldest)
    except OperationalError as error:
        raise ValueError(f"the database cannot be reached: {error.orig}") from error
