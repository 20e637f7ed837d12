"""URLs of databases: which are accepted, and how a path or another driver gets into one."""

from pathlib import Path

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

ASYNC_DRIVERS = {"postgresql": "psycopg", "sqlite": "aiosqlite"}
ALIASES = {"postgres": "postgresql"}  # of hosting providers and libpq
EXAMPLE = "postgresql+psycopg://user:password@host/name"


def normalise_url(url: str) -> str:
    """Return the URL with the driver that the service uses. Raises ValueError, whose message holds no password.

    Example: normalise_url("postgres://ada@db/attune") -> "postgresql+psycopg://ada@db/attune"
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise ValueError(
            f"not the URL of a database, such as {EXAMPLE}; in a user or password write % as %25, @ as %40, / as %2F"
        ) from None
    backend, _, driver = parsed.drivername.partition("+")
    backend = ALIASES.get(backend, backend)
    if (expected := ASYNC_DRIVERS.get(backend)) is None:
        raise ValueError(f"the database must be PostgreSQL or SQLite, such as {EXAMPLE}, not {backend[:40]}")
    if driver not in ("", expected):
        raise ValueError(f"the driver of {backend} must be {expected}, not {driver[:40]}; it may be left out")
    return _render(parsed.set(drivername=f"{backend}+{expected}"))


def sqlite_url(path: Path) -> str:
    """Return the URL of an SQLite database, whatever characters its path has."""
    return _render(URL.create(f"sqlite+{ASYNC_DRIVERS['sqlite']}", database=str(path)))


def blocking_url(url: str) -> URL:
    """Return the URL with a driver for blocking calls."""
    parsed = make_url(url)
    return parsed.set(drivername="sqlite") if parsed.get_backend_name() == "sqlite" else parsed


def _render(url: URL) -> str:
    return url.render_as_string(hide_password=False)
