"""Files of the embedded database, and an installation without the PostgreSQL driver."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Connection, text

from app.cli.client import save_api_key
from app.cli.server import prepare_database
from app.core.database import Database
from app.core.processes import ManagedProcess
from app.core.settings import REPOSITORY, Settings

WITHOUT_PSYCOPG = """
import asyncio, sys
sys.modules["psycopg"] = None
import httpx2
import workers.celery_app
from app.cli.server import prepare_database
from app.core.settings import get_settings
from app.main import create_app
prepare_database(get_settings(), print)

async def serve():
    app = create_app(get_settings())
    async with app.router.lifespan_context(app):
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://attune") as api:
            print((await api.get("/livez")).status_code, (await api.get("/v1/models")).status_code)

asyncio.run(serve())
"""


def mode(path: Path) -> str:
    return oct(stat.S_IMODE(path.stat().st_mode))


@pytest.fixture(autouse=True)
def _usual_umask() -> Iterator[None]:
    old = os.umask(0o022)
    yield
    os.umask(old)


async def write_both_ways(path: Path) -> None:
    async with Database(f"sqlite+aiosqlite:///{path}") as db:
        async with db.write() as session:
            await session.execute(text("CREATE TABLE a (id INTEGER)"))
        await db.run_write(lambda connection: connection.execute(text("INSERT INTO a VALUES (1)")).rowcount)
        modes = {item.name: mode(item) for item in path.parent.iterdir()}
    assert modes == {name: "0o600" for name in ("attune.db", "attune.db-wal", "attune.db-shm")}


INSERT = (
    "import sqlite3, sys; connection = sqlite3.connect(sys.argv[1]); connection.execute('INSERT INTO a VALUES (1)'); \
connection.commit(); connection.close()"
)


async def test_other_process_does_not_delete_the_log_that_this_one_uses(tmp_path: Path) -> None:
    """SQLite deletes the write-ahead log with the last connection. Each process would then read commits of its own."""
    path = tmp_path / "attune.db"

    def count(connection: Connection) -> int:
        return int(connection.execute(text("SELECT count(*) FROM a")).scalar_one())

    async with Database(f"sqlite+aiosqlite:///{path}") as db:
        async with db.write() as session:
            await session.execute(text("CREATE TABLE a (id INTEGER)"))
        assert await db.run_read(count) == 0  # on a connection that is opened after the first
        for expected in (1, 2, 3):
            subprocess.run([sys.executable, "-c", INSERT, str(path)], check=True)
            assert path.with_name("attune.db-wal").exists()
            assert await db.run_read(count) == expected


async def test_files_of_embedded_database_are_private(tmp_path: Path) -> None:
    await write_both_ways(tmp_path / "attune.db")


async def test_older_database_file_becomes_private(tmp_path: Path) -> None:
    (tmp_path / "attune.db").touch(0o644)
    await write_both_ways(tmp_path / "attune.db")


async def test_memory_database_has_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with Database("sqlite+aiosqlite:///:memory:") as db, db.read() as session:
        await session.execute(text("SELECT 1"))
    assert list(tmp_path.iterdir()) == []


def test_home_and_its_secrets_are_private(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "new" / "home")
    prepare_database(settings, print)
    process = ManagedProcess("api", [sys.executable, "-c", "pass"], settings.logs_dir / "api.log")
    process.start()
    process.stop()
    assert mode(settings.home) == "0o700"
    assert {path.name: mode(path) for path in settings.home.iterdir() if path.is_file()} == {
        "attune.db": "0o600",
        "credentials.json": "0o600",
    }
    assert mode(settings.logs_dir) == "0o700"
    assert mode(process.log) == "0o600"


def test_existing_home_keeps_its_mode(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home")
    settings.home.mkdir(0o755)
    settings.credentials_file.touch(0o644)
    prepare_database(settings, print)
    save_api_key(settings, "sk-attune-x")
    assert mode(settings.home) == "0o755"
    assert mode(settings.credentials_file) == mode(settings.home / "attune.db") == "0o600"


def test_service_starts_without_psycopg(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_PSYCOPG],
        cwd=REPOSITORY,
        env={**os.environ, "ATTUNE_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.splitlines()[-1] == "200 401"
