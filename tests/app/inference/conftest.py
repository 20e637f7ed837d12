"""A scripted engine with a client."""

from collections.abc import AsyncIterator, Iterator

import pytest

from app.inference.engine import EngineClient
from app.inference.sglang.client import TENSORS_FIELDS, SGLangClient
from tests.support.scripted_engine import ScriptedEngine, serve


@pytest.fixture
def scripted() -> ScriptedEngine:
    return ScriptedEngine(api_key="user", admin_key="admin", adapters={"shop-v1": "/versions/shop-v1"})


@pytest.fixture
def scripted_url(scripted: ScriptedEngine) -> Iterator[str]:
    with serve(scripted) as url:
        TENSORS_FIELDS.pop(url, None)  # of another test's engine at this port
        yield url


@pytest.fixture
async def client(scripted_url: str) -> AsyncIterator[EngineClient]:
    client = SGLangClient(scripted_url, "user", "admin", read_timeout=60.0)
    yield client
    await client.aclose()
