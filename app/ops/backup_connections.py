"""How a backup and a restore reach the database: its kind, its engines, and the client programs of PostgreSQL."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import Connection, Engine, create_engine, make_url
from sqlalchemy.engine import URL

from app.core import db_timeouts
from app.ops.backup_manifest import BackupError

POLL_SECONDS = 0.2


def is_sqlite(url: str) -> bool:
    return url.startswith("sqlite")


def sqlite_path(url: str) -> Path:
    """Return the file of an SQLite database."""
    path = make_url(url).database
    if path is None or path == ":memory:" or path.startswith("file:"):
        raise BackupError("an SQLite database must be a file to be backed up or restored")
    return Path(path)


def connect_sqlite(path: Path) -> Engine:
    """Return an engine of the file."""
    return create_engine(URL.create("sqlite", database=str(path)))


def connect_postgres(url: str) -> Engine:
    """Return an engine whose statements have no limit."""
    return create_engine(url, connect_args=db_timeouts.connect_arguments(make_url(url), None), hide_parameters=True)


@contextmanager
def closing_engine(engine: Engine) -> Iterator[None]:
    try:
        yield
    finally:
        engine.dispose()


@contextmanager
def open_sqlite_copy(path: Path) -> Iterator[Connection]:
    """Open a copy for reading, without creating a file beside it."""
    query = {"mode": "ro", "immutable": "1", "uri": "true"}
    engine = create_engine(URL.create("sqlite", database=f"file:{quote(str(path))}", query=query))
    with closing_engine(engine), engine.connect() as connection:
        yield connection


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
