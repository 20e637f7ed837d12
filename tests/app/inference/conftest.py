"""A scripted engine with a client, and the same weights in transformers as a reference."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch

from app.inference.client import EngineClient
from tests.support.engine_adapters import ReferenceWeights
from tests.support.scripted_engine import ScriptedEngine, serve


@pytest.fixture
def scripted() -> ScriptedEngine:
    return ScriptedEngine(api_key="user", admin_key="admin", adapters={"shop-v1": "/versions/shop-v1"})


@pytest.fixture
def scripted_url(scripted: ScriptedEngine) -> Iterator[str]:
    with serve(scripted) as url:
        yield url


@pytest.fixture
async def client(scripted_url: str) -> AsyncIterator[EngineClient]:
    client = EngineClient(scripted_url, "user", "admin", read_timeout=60.0)
    yield client
    await client.aclose()


@pytest.fixture(scope="session")
def weights(engine_model: Path, tmp_path_factory: pytest.TempPathFactory) -> ReferenceWeights:
    torch.set_num_threads(1)
    return ReferenceWeights(engine_model, tmp_path_factory.mktemp("adapters"))
