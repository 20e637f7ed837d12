"""Adapters in the real engine: loaded during replies, scored as transformers scores them."""

import asyncio
from pathlib import Path

import pytest
import torch

from alignment.artifacts.manifest import write_manifest
from app.inference.engine import EngineClient
from app.inference.sglang.client import TENSORS_FIELD_LIST, TENSORS_FIELDS, SGLangClient
from app.inference.transport import AdapterMissing, EngineRefused
from tests.support.engine_adapters import ReferenceWeights
from tests.support.engine_fixture import RunningEngine
from tests.support.engine_replies import MakeCall
from workers.release.delivery.adapters import build_payload

pytestmark = pytest.mark.engine


async def test_scores_equal_those_of_transformers(engine_client: EngineClient, weights: ReferenceWeights) -> None:
    await engine_client.load_adapter("score-v1", weights.adapter("score-v1", seed=2))
    random = torch.Generator().manual_seed(0)
    sequences = [torch.randint(3, 300, (length,), generator=random).tolist() for length in (2, 7, 60, 300)]
    for name in (None, "score-v1"):
        scores = await engine_client.score(name, sequences)
        for sequence, score in zip(sequences, scores, strict=True):
            torch.testing.assert_close(torch.tensor(score), weights.logprobs(name, sequence), atol=1e-4, rtol=0)


async def test_last_token_of_vocabulary_is_scored(engine_client: EngineClient, weights: ReferenceWeights) -> None:
    last = weights._loaded[None].config.vocab_size - 1
    [score] = await engine_client.score(None, [[5, last, 7, last]])
    torch.testing.assert_close(torch.tensor(score), weights.logprobs(None, [5, last, 7, last]), atol=1e-4, rtol=0)


async def test_loading_adapter_does_not_affect_running_replies(
    engine_client: EngineClient, weights: ReferenceWeights, make_call: MakeCall
) -> None:
    tasks = [asyncio.create_task(engine_client.complete(make_call(f"{n}?", max_tokens=200))) for n in range(4)]
    path = weights.adapter("late-v1", seed=3)
    await engine_client.load_adapter("late-v1", path)
    await engine_client.warm_up_adapter("late-v1")
    completion = await engine_client.complete(make_call(adapter="late-v1"))
    for capture, name in [
        (completion.capture, "late-v1"),
        *[((await task).capture, None) for task in tasks],
    ]:
        assert capture.exclusion_reason is None
        expected = weights.logprobs(name, capture.prompt_ids + capture.output_ids)[-len(capture.output_ids) :]
        torch.testing.assert_close(torch.tensor(capture.logprobs), expected, atol=1e-4, rtol=0)


async def test_loading_and_unloading_are_idempotent(engine_client: EngineClient, weights: ReferenceWeights) -> None:
    path = weights.adapter("twice-v1", seed=4)
    await engine_client.load_adapter("twice-v1", path)
    await engine_client.load_adapter("twice-v1", path)
    assert "twice-v1" in await engine_client.list_adapters()
    await engine_client.unload_adapter("twice-v1")
    await engine_client.unload_adapter("twice-v1")
    assert "twice-v1" not in await engine_client.list_adapters()


async def test_missing_folder_is_refused(engine_client: EngineClient, tmp_path: Path) -> None:
    with pytest.raises(EngineRefused):
        await engine_client.load_adapter("ghost-v1", tmp_path / "ghost")
    assert await engine_client.can_generate()


async def test_adapter_from_request_equals_adapter_from_folder(
    engine_client: EngineClient, weights: ReferenceWeights
) -> None:
    path = weights.adapter("uploaded-v1", seed=5)
    payload = build_payload(path, write_manifest(path, {}))
    await engine_client.load_adapter("uploaded-v1", payload)
    assert TENSORS_FIELDS[engine_client.url] == TENSORS_FIELD_LIST
    await engine_client.load_adapter("uploaded-v1", payload)
    await engine_client.load_adapter("by-path-v1", path)
    ids = list(range(5, 60))
    [uploaded], [by_path] = [await engine_client.score(name, [ids]) for name in ("uploaded-v1", "by-path-v1")]
    torch.testing.assert_close(torch.tensor(uploaded), torch.tensor(by_path), atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.tensor(uploaded), weights.logprobs("uploaded-v1", ids), atol=1e-4, rtol=0)


async def test_unknown_adapter_is_adapter_missing(engine_client: EngineClient, make_call: MakeCall) -> None:
    with pytest.raises(AdapterMissing):
        await engine_client.complete(make_call(adapter="nobody-v1"))
    with pytest.raises(AdapterMissing):
        async with engine_client.stream(make_call(adapter="nobody-v1")):
            pass
    with pytest.raises(AdapterMissing):
        await engine_client.score("nobody-v1", [[1, 2, 3]])


async def test_engine_requires_keys(engine: RunningEngine, make_call: MakeCall) -> None:
    client_with_wrong_key = SGLangClient(engine.spec.url, "wrong", engine.spec.api_key)
    with pytest.raises(EngineRefused):
        await client_with_wrong_key.complete(make_call())
    with pytest.raises(EngineRefused):
        await client_with_wrong_key.abort("chatcmpl-")
    await client_with_wrong_key.aclose()
