"""URLs of databases: paths with any characters, the schemes that people have, and clear refusals."""

import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import make_url, text

from app.core import migrate
from app.core.database import Database
from app.core.database_url import blocking_url, normalise_url, sqlite_url
from app.core.settings import REPOSITORY, Settings
from app.core.settings.loading import SettingsError, load_settings

NAMES = ["what?x=1", "%41", "50% off", "a#b&c=d", "b+aiosqlite", "ü @:x", "file:x", "%(here)s", "C:\\data", "a;b"]


@pytest.mark.parametrize("name", NAMES)
def test_database_lies_inside_a_home_of_any_name(tmp_path: Path, name: str) -> None:
    home = tmp_path / name
    home.mkdir()
    settings = Settings(home=home)
    assert make_url(settings.database_url).database == str(home / "attune.db")
    migrate.upgrade(settings.database_url)
    migrate.require_compatible_schema(settings.database_url)
    with closing(sqlite3.connect(home / "attune.db")) as database:
        assert database.execute("SELECT count(*) FROM alembic_version").fetchone() == (1,)
    assert [path.name for path in tmp_path.iterdir()] == [name], "nothing outside of the home"


@pytest.mark.parametrize("name", NAMES)
async def test_both_engines_open_a_database_of_any_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name / "attune.db"
    path.parent.mkdir()
    async with Database(sqlite_url(path)) as db:
        async with db.write() as session:
            await session.execute(text("CREATE TABLE t (n INTEGER)"))
        assert await db.run_read(lambda connection: connection.execute(text("SELECT count(*) FROM t")).scalar()) == 0
    assert path.exists() and [one.name for one in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["100% done", "%41", "what?x=1", "%(here)s"])
def test_commands_run_in_a_checkout_of_any_name(tmp_path: Path, name: str) -> None:
    checkout, home = tmp_path / name, tmp_path / "home"
    for folder in ("app", "alignment", "workers", "migrations"):
        shutil.copytree(REPOSITORY / folder, checkout / folder, ignore=shutil.ignore_patterns("__pycache__"))
    code = (
        f"from app.core import migrate, settings; url = settings.Settings(home={str(home)!r}).database_url; "
        "migrate.upgrade(url); migrate.require_compatible_schema(url); print(settings.REPOSITORY)"
    )
    home.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=checkout,
        env={"PYTHONPATH": str(checkout)},
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout.strip()) == (0, str(checkout)), done.stderr[-500:]
    assert (home / "attune.db").exists()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("postgres://ada:p%40ss@db/attune", "postgresql+psycopg://ada:p%40ss@db/attune"),
        ("postgresql://ada@db:5433/attune?sslmode=require", "postgresql+psycopg://ada@db:5433/attune?sslmode=require"),
        ("postgresql+psycopg://ada@db/attune", "postgresql+psycopg://ada@db/attune"),
        ("sqlite:////srv/a.db", "sqlite+aiosqlite:////srv/a.db"),
        ("sqlite+aiosqlite:////srv/a.db", "sqlite+aiosqlite:////srv/a.db"),
    ],
)
def test_common_schemes_are_accepted(url: str, expected: str) -> None:
    assert normalise_url(url) == expected
    assert Settings(database={"url": url}).database_url == expected


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://ada:secret@db/attune", "the database must be PostgreSQL or SQLite"),
        ("postgresql+asyncpg://ada:secret@db/attune", "the driver of postgresql must be psycopg, not asyncpg"),
        ("postgres+psycopg2://ada:secret@db/attune", "the driver of postgresql must be psycopg, not psycopg2"),
        ("ada:secret@db/attune", "not the URL of a database"),
        ("postgresql://ada:secret@db:port/attune", "not the URL of a database"),
        ("/srv/secret/attune.db", "not the URL of a database"),
    ],
)
def test_other_urls_are_refused_in_one_sentence_without_the_password(url: str, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings({"ATTUNE_DATABASE__URL": url})
    [problem] = caught.value.problems
    assert problem.startswith(f"ATTUNE_DATABASE__URL: database.url: {message}")
    assert "secret" not in problem and "\n" not in problem


def test_blocking_url_changes_the_driver_alone() -> None:
    assert blocking_url(sqlite_url(Path("/srv/b+aiosqlite/a.db"))).database == "/srv/b+aiosqlite/a.db"
    assert blocking_url("postgresql+psycopg://ada@db/x").drivername == "postgresql+psycopg"
