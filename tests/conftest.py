"""Fixtures of the whole house: a fresh database, the API over it, and an engine on record."""

import gc
import os
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from uuid import uuid4

import httpx2
import hypothesis
import psycopg
import pytest
from sqlalchemy import text

from app.core.database import Database
from app.core.migrate import upgrade
from app.core.settings import Settings
from app.main import create_app
from app.models import Base, Engine, EngineState
from app.projects.bootstrap import bootstrap
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine, serve

pytest_plugins = ["tests.support.engine_fixture"]

# Examples may take their time, for a busy machine is no failure; and they are the same in every run, unless asked for.
hypothesis.settings.register_profile(
    "patient",
    deadline=None,
    derandomize=os.environ.get("ATTUNE_FULL") != "1",
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("patient")

TESTS = Path(__file__).parent
STARTED = time.monotonic()
REQUIRED = os.environ.get("ATTUNE_REQUIRE_SERVICES") == "1"
POSTGRES = os.environ.get("ATTUNE_TEST_POSTGRES", "postgresql://postgres@127.0.0.1:5432/test")


# `make test` runs the PostgreSQL variant of these folders: their queries, locks and conflicts differ by database.
# Of all other tests it runs the SQLite variant alone; `make test-all` and CI run both.
POSTGRES_FOLDERS = (
    "app/core",
    "app/feedback",
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
    """Mark slow variants, and keep all tests of the real engine on one xdist worker, so that one engine serves them."""
    for item in items:
        place = item.path.relative_to(TESTS).as_posix()
        if item.get_closest_marker("postgres") and not place.startswith(POSTGRES_FOLDERS):
            item.add_marker(pytest.mark.slow)
        if "engine" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("engine"))


def pytest_collection_finish() -> None:
    """Freeze the libraries' objects: they never die, and collecting them again and again takes a tenth of the run."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    budget = item.config.getoption("--budget-minutes")
    if budget is not None and time.monotonic() - STARTED > 60 * budget:
        pytest.skip(f"not run: the budget of {budget:g} minutes is spent")


def missing(what: str) -> None:
    """A service that is not there skips the test; in CI it fails it."""
    if REQUIRED:
        pytest.fail(f"{what}, and ATTUNE_REQUIRE_SERVICES=1")
    pytest.skip(what)


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URL of a database of our own, at the newest schema."""
    name = f"attune_{uuid4().hex[:12]}"
    try:
        server = psycopg.connect(POSTGRES, autocommit=True, connect_timeout=3)
    except psycopg.OperationalError as error:
        missing(f"no PostgreSQL at {POSTGRES} ({error})")
    server.execute(f"CREATE DATABASE {name}")
    url = POSTGRES.rpartition("/")[0].replace("postgresql://", "postgresql+psycopg://") + f"/{name}"
    upgrade(url)
    yield url
    server.execute(f"DROP DATABASE {name} WITH (FORCE)")
    server.close()


@pytest.fixture(scope="session")
def blank_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An embedded database at the newest schema, to copy."""
    path = tmp_path_factory.mktemp("blank") / "attune.db"
    upgrade(f"sqlite+aiosqlite:///{path}")
    return path


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def database_url(request: pytest.FixtureRequest, blank_sqlite: Path, tmp_path: Path) -> str:
    """Both databases that Attune runs on: the embedded one and the real one."""
    if request.param == "postgres":
        url: str = request.getfixturevalue("postgres")
        return url
    (tmp_path / "home").mkdir()
    shutil.copy(blank_sqlite, tmp_path / "home" / "attune.db")
    return f"sqlite+aiosqlite:///{tmp_path}/home/attune.db"


@pytest.fixture
def settings(tmp_path: Path, database_url: str) -> Settings:
    """A small deployment in a temporary folder: eight samples a batch. Leases outlast any pause of a busy machine: a
    test that needs one to run out says so itself. Nobody is capped or doubted, for what tests put on record is much
    alike."""
    (tmp_path / "home").mkdir(exist_ok=True)
    return Settings(
        home=tmp_path / "home",
        database_url=database_url,
        policy="shop",
        batch_size=8,
        lease_seconds=60.0,
        max_attempts=3,
        max_rater_share=1.0,
        max_conversation_share=1.0,
        max_cluster_share=1.0,
        trust=False,
    )


@pytest.fixture
async def db(settings: Settings) -> AsyncIterator[Database]:
    database = Database(settings.database)
    yield database
    if not database.embedded:
        await emptied(database)
    await database.close()


async def emptied(database: Database) -> None:
    """Every row deleted, in whatever order (a TRUNCATE makes new files of every table, which takes 0.1 s), and the
    counters at one. Whoever still writes is waited for."""
    tables = Base.metadata.sorted_tables
    counted = [
        (table.name, table.autoincrement_column.name) for table in tables if table.autoincrement_column is not None
    ]
    async with database.write() as session:
        for statement in (
            f"LOCK TABLE {', '.join(table.name for table in tables)} IN ACCESS EXCLUSIVE MODE",
            "SET LOCAL session_replication_role = replica",
            *(f"DELETE FROM {table.name}" for table in tables),
            *(f"SELECT setval(pg_get_serial_sequence('{table}', '{column}'), 1, false)" for table, column in counted),
        ):
            await session.execute(text(statement))


@pytest.fixture
async def harness(settings: Settings, db: Database) -> AsyncIterator[Harness]:
    """A bootstrapped deployment and its API, with one engine on record as ready (nobody answers there)."""
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
    """A scripted engine behind the ring's API, holding no adapters yet."""
    engine = ScriptedEngine()
    with serve(engine) as url:
        async with harness.db.write() as session:
            (await session.get_one(Engine, "engine-0")).url = url
        yield engine


@pytest.fixture
async def second(harness: Harness, scripted: ScriptedEngine) -> AsyncIterator[ScriptedEngine]:
    """Another replica beside the first."""
    engine = ScriptedEngine()
    with serve(engine) as url:
        async with harness.db.write() as session:
            session.add(Engine(name="engine-1", url=url, state=EngineState.READY, incarnation=1, loaded=[]))
        yield engine


@pytest.fixture
def served(harness: Harness) -> Iterator[str]:
    """The ring's API on a real socket, for stock clients and for clients that hang up. Its own process state."""
    with serve(create_app(harness.settings), lifespan="on") as url:
        yield url
