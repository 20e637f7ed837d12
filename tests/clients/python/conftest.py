"""The client of clients/python, against the API with a scripted engine on a real socket, with injected faults."""

from collections.abc import Iterator

import pytest
from attune_client import Attune

from app.main import create_app
from tests.support.deployment import Harness
from tests.support.faulty_api import FaultyApi
from tests.support.scripted_engine import ScriptedEngine, serve


@pytest.fixture
def database_url(sqlite_url: str) -> str:
    """Return SQLite's alone: a client cannot see which database the service has."""
    return sqlite_url


@pytest.fixture
def api(harness: Harness, scripted: ScriptedEngine) -> FaultyApi:
    return FaultyApi(create_app(harness.settings))


@pytest.fixture
def url(api: FaultyApi) -> Iterator[str]:
    with serve(api, lifespan="on") as url:
        yield url


@pytest.fixture
def client(url: str, harness: Harness) -> Iterator[Attune]:
    with Attune(url, harness.key, timeout=20) as client:
        yield client
