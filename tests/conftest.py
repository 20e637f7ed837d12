"""Fixtures that all tests share: an empty database, the API with its database, and scripted engines."""

import gc
import os
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NoReturn
from uuid import uuid4

import httpx2
import hypothesis
import psycopg
import pytest
from sqlalchemy import text

from app.core.database import Database
from app.core.migrate import upgrade
from app.core.settings import Settings
from app.feedback import settled_votes
from app.main import create_app
from app.models import Base, Engine, EngineState
from app.projects.service import bootstrap
from tests.support.compiled_statements import share_compiled_statements
from tests.support.deployment import Harness
from tests.support.hostile_postgres import hostile_postgres
from tests.support.loaded_migrations import load_migrations_once
from tests.support.old_databases import drop_databases, find_old_databases
from tests.support.row_order import reverse_unordered_selects
from tests.support.scripted_engine import ScriptedEngine, serve
from workers import curate
from workers.training import assemble

pytest_plugins = [
    "tests.support.engine_fixture",
    "tests.support.vllm_fixture",
    "tests.support.scheduling",
    "tests.support.shuffle",
    "tests.clients.retries",
]

reverse_unordered_selects()
share_compiled_statements()
load_migrations_once()

# No deadline for an example, because a loaded machine is not a failure. ATTUNE_FULL=1 draws new examples in every run.
hypothesis.settings.register_profile(
    "attune",
    deadline=None,
    derandomize=os.environ.get("ATTUNE_FULL") != "1",
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("attune")

TESTS = Path(__file__).parent
STARTED = time.monotonic()
REQUIRED = os.environ.get("ATTUNE_REQUIRE_SERVICES") == "1"
POSTGRES = os.environ.get("ATTUNE_TEST_POSTGRES", "postgresql://postgres@127.0.0.1:5432/test")


# `make test` runs the PostgreSQL variant of these folders: their queries, locks and conflicts differ by database.
# Of all other tests it runs the SQLite variant alone; `make test-all` and CI run both.
POSTGRES_FOLDERS = (
    "app/core",
    "app/environments/test_claims",
    "app/feedback",
    "app/ops/test_audit_chain",
    "app/ops/test_backup",
    "app/ops/test_webhook",
    "app/privacy",
    "workers/feedback",
    "workers/training/test_assemble",
    "workers/training/test_batches",
    "workers/test_reconcile",
    "migrations",
    "journeys",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--budget-minutes", type=float, default=None, help="skip the tests that have not begun after this many minutes"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the slow PostgreSQL variants."""
    for item in items:
        place = item.path.relative_to(TESTS).as_posix()
        if item.get_closest_marker("postgres") and not place.startswith(POSTGRES_FOLDERS):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Exclude the libraries' objects from garbage collection, which otherwise takes a tenth of the run."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    budget = item.config.getoption("--budget-minutes")
    if budget is not None and time.monotonic() - STARTED > 60 * budget:
        pytest.skip(f"not run: the budget of {budget:g} minutes is spent")


def skip_or_fail(what: str) -> NoReturn:
    """Skip the test because a service is missing; fail it if ATTUNE_REQUIRE_SERVICES=1, as in CI."""
    if REQUIRED:
        pytest.fail(f"{what}, and ATTUNE_REQUIRE_SERVICES=1")
    pytest.skip(what)


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """Yield the URL of a new PostgreSQL database with the newest schema."""
    name = f"attune_{uuid4().hex[:12]}"
    try:
        server = psycopg.connect(POSTGRES, autocommit=True, connect_timeout=3)
    except psycopg.OperationalError as error:
        skip_or_fail(f"no PostgreSQL at {POSTGRES} ({error})")
    drop_databases(server, find_old_databases(server))
    server.execute(f"CREATE DATABASE {name}")
    url = POSTGRES.rpartition("/")[0].replace("postgresql://", "postgresql+psycopg://") + f"/{name}"
    upgrade(url)
    with hostile_postgres(url):
        yield url
    server.execute(f"DROP DATABASE {name} WITH (FORCE)")
    server.close()


@pytest.fixture(scope="session")
def blank_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a SQLite file with the newest schema, to copy."""
    path = tmp_path_factory.mktemp("blank") / "attune.db"
    upgrade(f"sqlite+aiosqlite:///{path}")
    return path


@pytest.fixture
def sqlite_url(blank_sqlite: Path, tmp_path: Path) -> str:
    """Return the URL of an empty SQLite database, in a folder `home`."""
    (tmp_path / "home").mkdir()
    shutil.copy(blank_sqlite, tmp_path / "home" / "attune.db")
    return f"sqlite+aiosqlite:///{tmp_path}/home/attune.db"


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def database_url(request: pytest.FixtureRequest) -> str:
    """Return the URL of an empty database: SQLite and, as a second variant, PostgreSQL."""
    url: str = request.getfixturevalue("postgres" if request.param == "postgres" else "sqlite_url")
    return url


@pytest.fixture
def settings(tmp_path: Path, database_url: str) -> Settings:
    """Return the settings of a small deployment in a temporary folder, with eight samples per batch.

    Leases and time limits outlast the pauses of a loaded machine. The caps of shares and the rater trust are off,
    because the samples of tests are much alike.
    """
    (tmp_path / "home").mkdir(exist_ok=True)
    return Settings(
        home=tmp_path / "home",
        database={"url": database_url, "request_timeout_seconds": 20.0},
        policy="shop",
        trainer={"batch_size": 8, "max_batch_size": 8},
        workers={"lease_seconds": 60.0, "max_attempts": 3},
        raters={"max_rater_share": 1.0, "max_conversation_share": 1.0, "max_cluster_share": 1.0, "trust": False},
    )


@pytest.fixture
async def db(settings: Settings) -> AsyncIterator[Database]:
    database = Database(settings.database_url)
    try:
        if not database.embedded:
            await delete_all_rows(database)  # tests without this fixture, and ones that were cut off, leave rows
        yield database
        if not database.embedded:
            await delete_all_rows(database)
    finally:
        await database.close()


async def delete_all_rows(database: Database) -> None:
    """Delete every row and reset the sequences, after all running transactions have ended.

    TRUNCATE would create new files for every table, which takes 0.1 s.
    """
    tables = Base.metadata.sorted_tables
    sequences = [
        (table.name, table.autoincrement_column.name) for table in tables if table.autoincrement_column is not None
    ]
    async with database.write() as session:
        for statement in (
            f"LOCK TABLE {', '.join(table.name for table in tables)} IN ACCESS EXCLUSIVE MODE",
            "SET LOCAL session_replication_role = replica",
            *(f"DELETE FROM {table.name}" for table in tables),
            *(f"SELECT setval(pg_get_serial_sequence('{table}', '{column}'), 1, false)" for table, column in sequences),
        ):
            await session.execute(text(statement))


@pytest.fixture
def long_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each run of a task do all that there is to do, however slow the machine is."""
    for task in (assemble, curate, settled_votes):
        monkeypatch.setattr(task, "RUN_SECONDS", 3600.0)


@pytest.fixture
async def harness(settings: Settings, db: Database, long_runs: None) -> AsyncIterator[Harness]:
    """Yield a bootstrapped deployment and its API. Its one engine is ready, at an address without a server."""
    async with db.write() as session:
        key = await bootstrap(session, settings.policy, settings.model)
        session.add(
            Engine(name="engine-0", url="http://127.0.0.1:9", state=EngineState.READY, incarnation=1, loaded=[])
        )
    assert key is not None
    app = create_app(settings)
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app, raise_app_exceptions=False),
            base_url="http://attune",
            headers={"authorization": f"Bearer {key}"},
        ) as api,
    ):
        yield Harness(settings=settings, db=db, key=key, _api=api)


@pytest.fixture
async def scripted(harness: Harness) -> AsyncIterator[ScriptedEngine]:
    """Yield a scripted engine that the API of `harness` uses. It has loaded no adapter."""
    engine = ScriptedEngine()
    with serve(engine) as url:
        async with harness.db.write() as session:
            (await session.get_one(Engine, "engine-0")).url = url
        yield engine


@pytest.fixture
async def second_engine(harness: Harness, scripted: ScriptedEngine) -> AsyncIterator[ScriptedEngine]:
    """Yield a second scripted engine of the same deployment."""
    engine = ScriptedEngine()
    with serve(engine) as url:
        async with harness.db.write() as session:
            session.add(Engine(name="engine-1", url=url, state=EngineState.READY, incarnation=1, loaded=[]))
        yield engine


@pytest.fixture
def live_url(harness: Harness) -> Iterator[str]:
    """Yield the URL of the API on a real socket, for stock clients and for clients that disconnect."""
    with serve(create_app(harness.settings), lifespan="on") as url:
        yield url
