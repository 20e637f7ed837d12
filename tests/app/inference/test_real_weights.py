"""Full weights in the real engine: swapped during replies and never mixed."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from app.inference.engine import BASE_WEIGHTS, EngineClient
from app.inference.sglang.client import SGLangClient
from tests.support.engine_adapters import ReferenceWeights, bias_without_end
from tests.support.engine_fixture import (
    UNCHECKED,
    InMemoryEngineRecord,
    engine_spec,
    require_engine_environment,
    wait_for_event,
)
from tests.support.engine_replies import MakeCall
from tests.support.full_weights import make_weights
from workers.engine.supervisor import Supervisor
from workers.engine.version_files import WeightsRef

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture
async def client(engine_model: Path, tmp_path: Path) -> AsyncIterator[EngineClient]:
    """Yield a client of an engine that starts with the weights of v1."""
    require_engine_environment()
    versions = [tmp_path / f"shop-v{number}" for number in (1, 2)]
    sha256s = [make_weights(path, engine_model, seed=seed) for seed, path in enumerate(versions)]
    record = InMemoryEngineRecord([WeightsRef("shop-v1", versions[0], sha256s[0])])
    spec = replace(engine_spec(tmp_path, engine_model), adapter=None)
    supervisor = Supervisor(spec, record, UNCHECKED)
    running = asyncio.create_task(supervisor.run())
    await wait_for_event(record, "ready 1")
    assert record.loaded == ["shop-v1"]
    client = SGLangClient(spec.url, spec.api_key, spec.admin_key)
    yield client
    await client.aclose()
    supervisor.stop()
    await running


async def assert_scores_match(client: EngineClient, path: Path, key: str) -> None:
    """Assert that the engine scores as transformers does with the weights of this folder."""
    reference = ReferenceWeights(path, path)
    sequences = [torch.randint(3, 300, (length,)).tolist() for length in (2, 60, 200)]
    for sequence, score in zip(sequences, await client.score(None, sequences, extra_key=key), strict=True):
        torch.testing.assert_close(torch.tensor(score), reference.logprobs(None, sequence), atol=1e-4, rtol=0)


async def test_weights_are_swapped_during_replies_and_back(
    client: EngineClient, engine_model: Path, tmp_path: Path, make_call: MakeCall
) -> None:
    await assert_scores_match(client, tmp_path / "shop-v1", "shop-v1")
    prompt = {"text": "When do you open on Saturdays, and may I bring my bicycle?"}
    old = make_call(**prompt, prefix_key="shop-v1", weights="shop-v1", max_tokens=8)
    assert (await client.complete(old)).capture.exclusion_reason is None

    call = make_call(
        "Tell me all.",
        prefix_key="shop-v1",
        weights="shop-v1",
        max_tokens=600,
        logit_bias=bias_without_end(engine_model),
    )
    stream_call = replace(call, rid=f"{call.rid[:-1]}z")
    task = asyncio.create_task(client.complete(call))
    async with client.stream(stream_call) as reply:
        chunks = aiter(reply)
        for _ in range(5):
            await anext(chunks)
        async with client.paused():
            assert not await client.is_ready()
            waiting = asyncio.create_task(
                client.complete(make_call(**prompt, prefix_key="shop-v2", weights="shop-v2", max_tokens=8))
            )
            await client.load_weights(tmp_path / "shop-v2", "shop-v2")
        async for _ in chunks:
            pass
    assert await client.is_ready()
    capture = (await task).capture
    assert [span["version"] for span in capture.weight_versions] == ["shop-v1", "shop-v2"]
    assert capture.weight_versions[-1]["end"] == len(capture.output_ids) == 600
    assert capture.exclusion_reason == "the base weights changed during the reply: shop-v1, shop-v2"
    assert reply.capture is not None
    assert len(reply.capture.output_ids) == 600, "the stream was neither cut nor restarted"

    # The old weights generated the tokens before the swap, the new weights those after it.
    cut = capture.weight_versions[0]["end"]
    ids, captured_logprobs = capture.prompt_ids + capture.output_ids, torch.tensor(capture.logprobs)
    for version, part in (("shop-v1", slice(0, cut)), ("shop-v2", slice(cut, None))):
        reference = ReferenceWeights(tmp_path / version, tmp_path).logprobs(None, ids)[-len(capture.output_ids) :]
        # The logit bias changes every log-prob by the probability of one token.
        assert (captured_logprobs - reference)[part].abs().median() < 0.05, version

    new = (await waiting).capture
    assert (new.exclusion_reason, new.weight_versions[0]["version"]) == (None, "shop-v2")
    reference = ReferenceWeights(tmp_path / "shop-v2", tmp_path).logprobs(None, new.prompt_ids + new.output_ids)
    torch.testing.assert_close(torch.tensor(new.logprobs), reference[-len(new.output_ids) :], atol=1e-4, rtol=0)
    late_call = make_call(**prompt, prefix_key="shop-v1", weights="shop-v1", max_tokens=8)
    late_capture = (await client.complete(late_call)).capture
    assert late_capture.exclusion_reason == "the weights of shop-v2 generated the reply, not those of shop-v1"
    await assert_scores_match(client, tmp_path / "shop-v2", "shop-v2")

    for path, name in ((tmp_path / "shop-v1", "shop-v1"), (engine_model, BASE_WEIGHTS)):
        async with client.paused():
            await client.load_weights(path, name)
        await assert_scores_match(client, path, name)
