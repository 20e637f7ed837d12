"""`served`: each kind of engine in turn. One real engine of a kind serves the whole run."""

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import pytest

from app.inference.pool import connect
from tests.contract.engine.served_engines import KEYS, KINDS, SCRIPTED, SGLANG, VLLM, ScriptedReference, ServedEngine
from tests.support.engine_adapters import ReferenceWeights, bias_without_end
from tests.support.engine_fixture import RunningEngine, engine_spec, require_engine_environment
from tests.support.scripted_engine import ScriptedEngine, serve
from tests.support.vllm_fixture import require_vllm_environment, vllm_spec
from workers.engine.process import EngineSpec

LONG_TEXT = " ".join(f"word{number}" for number in range(1500))


@dataclass(frozen=True)
class Address:
    url: str
    kind: str


@pytest.fixture(scope="session")
def scripted_address() -> Iterator[Address]:
    """Yield a scripted engine, which answers as SGLang does. It takes a while for each token."""
    engine = ScriptedEngine(KEYS.api, KEYS.admin, seconds_per_token=0.002, reply_text=LONG_TEXT, context_length=2048)
    with serve(engine) as url:
        yield Address(url, "sglang")


@pytest.fixture(params=[SCRIPTED, *(pytest.param(kind, marks=pytest.mark.engine) for kind in KINDS[1:])])
async def served(request: pytest.FixtureRequest) -> AsyncIterator[ServedEngine]:
    kind: str = request.param
    if kind == SCRIPTED:
        address: Address = request.getfixturevalue("scripted_address")
        client = connect(address, KEYS)
        async with aclosing(client):
            yield ServedEngine(kind, client, ScriptedReference(), lambda keys: connect(address, keys), 2048, {})
        return
    running: RunningEngine = request.getfixturevalue(FIXTURE_BY_KIND[kind])
    model: Path = request.getfixturevalue("engine_model")
    weights: ReferenceWeights = request.getfixturevalue("weights")
    client = running.connect()
    async with aclosing(client):
        yield ServedEngine(
            kind,
            client,
            weights,
            lambda keys: connect(running.spec, keys),
            running.spec.context_length,
            bias_without_end(model),
        )


FIXTURE_BY_KIND = {SGLANG: "engine", VLLM: "vllm_engine"}


def require_environment(kind: str) -> None:
    """Skip the test where this kind of engine is not installed."""
    require_engine_environment() if kind == SGLANG else require_vllm_environment()


def spec_of(kind: str, folder: Path, model: Path) -> EngineSpec:
    """Return the spec of an engine of its own."""
    return engine_spec(folder, model) if kind == SGLANG else vllm_spec(folder, model)
