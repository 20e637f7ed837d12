"""A scripted engine to talk to, and the same weights in transformers to compare with."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch

from app.inference.client import EngineClient
from tests.support.engine_adapters import Weights
from tests.support.scripted_engine import ScriptedEngine, serving


@pytest.fixture
def scripted() -> ScriptedEngine:
    return ScriptedEngine(api_key="user", admin_key="admin", adapters={"shop-v1": "/versions/shop-v1"})


@pytest.fixture
def scripted_url(scripted: ScriptedEngine) -> Iterator[str]:
    with serving(scripted) as url:
        yield url


@pytest.fixture
async def client(scripted_url: str) -> AsyncIterator[EngineClient]:
    client = EngineClient(scripted_url, "user", "admin", patience=60.0)
    yield client
    await client.aclose()


@pytest.fixture(scope="session")
def weights(engine_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    torch.set_num_threads(1)
    return Weights(engine_model, tmp_path_factory.mktemp("adapters"))
