"""A running Attune with the real engine (`attune`, one for the run), and its database (`record`)."""

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine as Connection
from sqlalchemy import create_engine, select
from sqlalchemy.orm import Session

from app.core.database import Database
from app.core.settings import Settings
from app.main import create_app
from app.models import Engine, EngineState, Feedback, Turn
from app.projects.service import bootstrap
from tests.support.engine_fixture import DEMO_MODEL, RunningEngine
from tests.support.scripted_engine import serve

POLICY = "shop"
CONSTRAINED = "a grammar constrained the reply: its log-probs are not the model's own"


@dataclass(frozen=True)
class Running:
    """The URL and the API key for a client."""

    url: str
    key: str
    settings: Settings

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"


@dataclass(frozen=True)
class Record:
    """Direct read access to the database."""

    connection: Connection

    def turns(self, completion_id: str) -> list[Turn]:
        """Return the turns of a completion, ordered by choice."""
        with Session(self.connection, expire_on_commit=False) as session:
            turns = select(Turn).where(Turn.completion_id == completion_id).order_by(Turn.choice_index)
            return list(session.scalars(turns))

    def turn(self, completion_id: str, *, exclusion_reason: str | None = None) -> Turn:
        """Return the only turn of a completion. Asserts an exact capture with this exclusion reason."""
        [turn] = self.turns(completion_id)
        assert_exact(turn, exclusion_reason=exclusion_reason)
        return turn

    def feedback(self, completion_id: str) -> list[Feedback]:
        with Session(self.connection, expire_on_commit=False) as session:
            return list(
                session.scalars(select(Feedback).where(Feedback.turn_id == completion_id).order_by(Feedback.seq))
            )


def assert_exact(turn: Turn, *, exclusion_reason: str | None = None) -> None:
    assert turn.state == "done" and turn.own_prompt_ids is not None
    assert turn.output_ids and turn.logprobs and len(turn.output_ids) == len(turn.logprobs) == turn.num_output_tokens
    assert turn.exclusion_reason == exclusion_reason


@pytest.fixture(scope="session")
def attune(engine: RunningEngine, blank_sqlite: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    if engine.spec.model != str(DEMO_MODEL):
        pytest.skip("the clients' tests speak with the demo model")
    with run_attune(tmp_path_factory.mktemp("clients"), blank_sqlite, engine) as running:
        yield running


@contextmanager
def run_attune(home: Path, blank_sqlite: Path, engine: RunningEngine) -> Iterator[Running]:
    """Run an API with a new database in `home`, whose one engine is this one, until the block ends."""
    shutil.copy(blank_sqlite, home / "attune.db")
    settings = Settings(
        home=home,
        model=engine.spec.model,
        policy=POLICY,
        server={"default_max_tokens": 160},
        engine={"api_key": engine.spec.api_key, "admin_key": engine.spec.admin_key},
    )
    key = asyncio.run(create_project(settings, engine.spec.url))
    with serve(create_app(settings), lifespan="on") as url:
        yield Running(url, key, settings)


async def create_project(settings: Settings, engine_url: str) -> str:
    db = Database(settings.database_url)
    async with db.write() as session:
        key = await bootstrap(session, settings.policy, settings.model)
        session.add(Engine(name="engine-0", url=engine_url, state=EngineState.READY, incarnation=1, loaded=[]))
    await db.close()
    assert key is not None
    return key


@pytest.fixture(scope="session")
def record(attune: Running) -> Iterator[Record]:
    connection = create_engine(attune.settings.database_url.replace("sqlite+aiosqlite", "sqlite"))
    yield Record(connection)
    connection.dispose()


@pytest.fixture(autouse=True)
def no_stray_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove keys and URLs from the environment, so that clients use the ones of the test."""
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_API_BASE", "ATTUNE_API_KEY", "ATTUNE_URL"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LANGSMITH_TRACING", "false")


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Every test of this folder needs the real engine; those of our own clients, in folders below, do not."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.engine)
