"""What is particular to vLLM: routes without keys, folders that are gone, adapters that it cannot use."""

import shutil
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from safetensors.torch import load_file, save_file

from app.inference.engine import EngineClient
from app.inference.transport import AdapterMissing, EngineRefused
from tests.support.engine_adapters import ReferenceWeights
from tests.support.engine_fixture import RunningEngine, run_engine
from tests.support.engine_replies import MakeCall
from tests.support.vllm_fixture import require_vllm_environment, vllm_spec
from workers.engine.vllm_spec import HELD_PER_SLOT

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
WITH_API_KEY = {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize"}


@pytest.fixture
async def client(vllm_engine: RunningEngine) -> AsyncIterator[EngineClient]:
    async with aclosing(vllm_engine.connect()) as client:
        yield client


async def test_no_route_answers_without_its_key(vllm_engine: RunningEngine) -> None:
    spec = vllm_engine.spec
    async with aiohttp.ClientSession(spec.url) as session:

        async def status(method: str, path: str, key: str | None) -> int:
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            async with session.request(method, path, headers=headers) as response:
                return response.status

        async with session.get("/openapi.json", headers={"authorization": f"Bearer {spec.admin_key}"}) as response:
            paths = (await response.json())["paths"]
        routes = [(method.upper(), path) for path, methods in paths.items() for method in methods]
        routes += [("GET", "/openapi.json"), ("GET", "/docs"), ("GET", "/metrics"), ("GET", "/attune/running")]
        assert {"/invocations", "/collective_rpc", "/pause"} <= {path for _, path in routes}
        for method, path in routes:
            assert await status(method, path, None) == 401, path
            assert await status(method, path, "wrong") == 401, path
            if path not in WITH_API_KEY:
                assert await status(method, path, spec.api_key) == 401, path
        assert await status("GET", "/v1/models", spec.api_key) == 200
        assert await status("GET", "/metrics", spec.admin_key) == 200


async def test_adapter_whose_folder_is_gone_is_missing(
    client: EngineClient, weights: ReferenceWeights, make_call: MakeCall
) -> None:
    path = weights.adapter("vanished-v1", seed=31)
    await client.load_adapter("vanished-v1", path)
    shutil.rmtree(path)
    with pytest.raises(AdapterMissing):
        await client.complete(make_call(adapter="vanished-v1"))
    with pytest.raises(AdapterMissing):
        await client.score("vanished-v1", [[1, 2, 3]])
    assert (await client.complete(make_call(max_tokens=2))).capture.output_ids


@pytest.mark.slow  # it starts an engine of its own
async def test_evicted_adapter_whose_folder_is_gone_does_not_end_the_engine(
    engine_model: Path, tmp_path: Path, make_call: MakeCall
) -> None:
    require_vllm_environment()
    weights = ReferenceWeights(engine_model, tmp_path)
    spec = replace(vllm_spec(tmp_path, engine_model), max_loras_per_batch=1)
    with run_engine(spec) as running:
        async with aclosing(running.connect()) as client:
            paths = [weights.adapter(f"evicted-v{number}", seed=number) for number in range(HELD_PER_SLOT + 2)]
            for number, path in enumerate(paths):
                await client.load_adapter(f"evicted-v{number}", path)
                await client.warm_up_adapter(f"evicted-v{number}")
            shutil.rmtree(paths[0])
            with pytest.raises(AdapterMissing):
                await client.complete(make_call(adapter="evicted-v0"))
            # One that was evicted, and whose folder is there, is read again.
            capture = (await client.complete(make_call(adapter="evicted-v1", max_tokens=8))).capture
            expected = weights.logprobs("evicted-v1", capture.prompt_ids + capture.output_ids)
            assert abs(sum(capture.logprobs) - float(expected[-len(capture.logprobs) :].sum())) < 1e-3


@pytest.mark.parametrize("change", ["truncated", "of another shape", "no weights"])
async def test_adapter_that_vllm_cannot_use_is_refused_and_harms_nothing(
    client: EngineClient, weights: ReferenceWeights, make_call: MakeCall, change: str
) -> None:
    name = f"damaged-{change.replace(' ', '-')}"
    file = weights.adapter(name, seed=32) / "adapter_model.safetensors"
    if change == "truncated":
        file.write_bytes(file.read_bytes()[:1000])
    elif change == "no weights":
        file.unlink()
    else:
        tensors = load_file(file)
        save_file({key: tensor.repeat(1, 2) for key, tensor in tensors.items()}, file)
    with pytest.raises(EngineRefused):
        await client.load_adapter(name, file.parent)
        await client.warm_up_adapter(name)
    assert (await client.complete(make_call(max_tokens=2))).capture.output_ids
