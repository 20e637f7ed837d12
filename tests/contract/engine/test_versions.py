"""Promises about versions: loaded, scored, replaced and unloaded, while others are answered."""

import asyncio
from pathlib import Path

import pytest
import torch

from alignment.artifacts.manifest import write_manifest
from app.inference.transport import AdapterMissing, EngineRefused, EngineUnavailable
from tests.contract.engine.served_engines import SCRIPTED, VLLM, ServedEngine
from tests.contract.engine.test_replies import MAX_DIFFERENCE, assert_exact
from tests.support.engine_replies import MakeCall
from workers.release.delivery.adapters import build_payload

pytestmark = pytest.mark.timeout(600)
IDS = list(range(5, 60))


async def assert_scored(served: ServedEngine, name: str | None, reference: str | None) -> None:
    [score] = await served.client.score(name, [IDS])
    expected = served.reference.logprobs(reference, IDS)
    torch.testing.assert_close(torch.tensor(score), expected, atol=MAX_DIFFERENCE, rtol=0)


async def test_scores_are_those_of_the_named_version(served: ServedEngine) -> None:
    name = "scored-v1"
    await served.client.load_adapter(name, served.reference.adapter(name, seed=3))
    random = torch.Generator().manual_seed(0)
    sequences = [torch.randint(3, 300, (length,), generator=random).tolist() for length in (2, 7, 60, 300)]
    for version in (None, name):
        for ids, score in zip(sequences, await served.client.score(version, sequences), strict=True):
            expected = served.reference.logprobs(version, ids)
            torch.testing.assert_close(torch.tensor(score), expected, atol=MAX_DIFFERENCE, rtol=0)


async def test_single_token_cannot_be_scored(served: ServedEngine) -> None:
    with pytest.raises(ValueError, match="two tokens"):
        await served.client.score(None, [[1, 2, 3], [1]])


async def test_loading_and_unloading_are_idempotent(served: ServedEngine) -> None:
    name = "again-v1"
    path = served.reference.adapter(name, seed=4)
    for _ in range(2):
        await served.client.load_adapter(name, path)
    assert name in await served.client.list_adapters()
    for _ in range(2):
        await served.client.unload_adapter(name)
    assert name not in await served.client.list_adapters()


async def test_version_that_is_not_held_is_missing(served: ServedEngine, make_call: MakeCall) -> None:
    with pytest.raises(AdapterMissing):
        await served.client.complete(make_call(adapter="nobody-v1"))
    with pytest.raises(AdapterMissing):
        async with served.client.stream(make_call(adapter="nobody-v1")):
            pass
    with pytest.raises(AdapterMissing):
        await served.client.score("nobody-v1", [[1, 2, 3]])


async def test_missing_folder_is_refused(served: ServedEngine, tmp_path: Path) -> None:
    if served.kind == SCRIPTED:
        pytest.skip("the scripted engine reads no files")
    with pytest.raises(EngineRefused):
        await served.client.load_adapter("ghost-v1", tmp_path / "ghost")
    assert "ghost-v1" not in await served.client.list_adapters()
    assert await served.client.can_generate()


async def test_loading_does_not_affect_running_replies(served: ServedEngine, make_call: MakeCall) -> None:
    calls = [make_call(f"{number}?", max_tokens=200) for number in range(4)]
    tasks = [asyncio.create_task(served.client.complete(call)) for call in calls]
    name = "joining-v1"
    await served.client.load_adapter(name, served.reference.adapter(name, seed=5))
    await served.client.warm_up_adapter(name)
    assert_exact(served, name, (await served.client.complete(make_call(adapter=name))).capture)
    for task in tasks:
        assert_exact(served, None, (await task).capture)


async def test_reply_of_an_unloaded_version_ends_as_it_would_have(served: ServedEngine, make_call: MakeCall) -> None:
    name = "leaving-v1"
    await served.client.load_adapter(name, served.reference.adapter(name, seed=6))
    bias = served.never_ends or None
    async with served.client.stream(make_call(adapter=name, max_tokens=300, logit_bias=bias)) as reply:
        chunks = aiter(reply)
        for _ in range(3):
            await anext(chunks)
        unloading = asyncio.create_task(served.client.unload_adapter(name))
        async for _ in chunks:
            pass
    await unloading
    assert reply.capture is not None
    assert (len(reply.capture.output_ids), reply.capture.finish_reason) == (300, "length")
    assert_exact(served, name, reply.capture, bias=bias)
    assert name not in await served.client.list_adapters()


async def test_name_that_is_used_again_is_never_answered_from_the_old_cache(
    served: ServedEngine, make_call: MakeCall
) -> None:
    """The key-value cache of a prompt belongs to the adapter that computed it, not to its name."""
    if served.kind == SCRIPTED:
        pytest.skip("the scripted engine's adapters are their names")
    paths = {version: served.reference.adapter(f"again-{version}", seed=seed) for seed, version in enumerate("ab", 7)}
    call = make_call("What does a repair of my bicycle cost on a Saturday?", adapter="again", max_tokens=24)
    for version, path in paths.items():
        await served.client.load_adapter("again", path)
        for _ in range(2):
            assert_exact(served, f"again-{version}", (await served.client.complete(call)).capture)
        await served.client.unload_adapter("again")


async def test_adapter_from_the_request_equals_the_one_from_its_folder(served: ServedEngine) -> None:
    if served.kind == SCRIPTED:
        pytest.skip("the scripted engine reads no files")
    name = "posted-v1"
    path = served.reference.adapter(name, seed=9)
    payload = build_payload(path, write_manifest(path, {}))
    if served.kind == VLLM:  # the settings refuse it at start
        with pytest.raises(EngineUnavailable, match="ATTUNE_ENGINE__ADAPTER_DELIVERY"):
            await served.client.load_adapter(name, payload)
        return
    for _ in range(2):
        await served.client.load_adapter(name, payload)
    await assert_scored(served, name, name)


async def test_broken_version_scores_nan_and_harms_no_other(
    served: ServedEngine, make_call: MakeCall, tmp_path: Path
) -> None:
    if served.kind == SCRIPTED:
        pytest.skip("the scripted engine reads no files")
    from safetensors.torch import load_file, save_file

    path = served.reference.adapter("broken-v1", seed=10)
    tensors = load_file(path / "adapter_model.safetensors")
    save_file({name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()},
              path / "adapter_model.safetensors")  # fmt: skip
    await served.client.load_adapter("broken-v1", path)
    [score] = await served.client.score("broken-v1", [IDS])
    assert all(value != value for value in score), "NaN, not an error"
    await served.client.unload_adapter("broken-v1")
    await assert_scored(served, None, None)
    good = "sound-v1"
    await served.client.load_adapter(good, served.reference.adapter(good, seed=11))
    for number in range(8):
        call = make_call(f"Question {number}?", adapter=good, max_tokens=8)
        assert_exact(served, good, (await served.client.complete(call)).capture)
