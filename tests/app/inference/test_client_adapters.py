"""Adapters of a scripted engine: loading is idempotent, and scores equal the captured log-probs."""

import asyncio
import socket
from pathlib import Path

import pytest

from app.inference.engine import AdapterPayload, EngineClient
from app.inference.sglang import client as client_module
from app.inference.sglang.client import TENSORS_FIELD_LIST, TENSORS_FIELD_TEXT, SGLangClient
from app.inference.transport import EngineRefused, EngineUnavailable
from tests.support.engine_replies import MakeCall
from tests.support.scripted_engine import ScriptedEngine


async def test_loading_is_idempotent(client: EngineClient) -> None:
    await client.load_adapter("shop-v2", Path("/versions/shop-v2"))
    await client.load_adapter("shop-v2", Path("/versions/shop-v2"))
    assert await client.list_adapters() == {"shop-v1", "shop-v2"}


@pytest.mark.parametrize("accepted_field", [TENSORS_FIELD_LIST, TENSORS_FIELD_TEXT])
async def test_tensors_use_the_field_the_engine_accepts(
    client: EngineClient, scripted: ScriptedEngine, accepted_field: str
) -> None:
    scripted.tensors_field = accepted_field
    for name in ("shop-v2", "shop-v3"):
        await client.load_adapter(name, AdapterPayload({"r": 8}, "AAAA"))
        await client.load_adapter(name, AdapterPayload({"r": 8}, "AAAA"))
    assert [body[accepted_field] for body in scripted.payloads] == [
        ["AAAA"] if accepted_field == TENSORS_FIELD_LIST else "AAAA"
    ] * 2
    assert scripted.payloads[1]["config_dict"] == {"r": 8}
    assert await client.list_adapters() == {"shop-v1", "shop-v2", "shop-v3"}


async def test_tensors_field_is_detected_again_after_engine_upgrade(
    client: EngineClient, scripted: ScriptedEngine
) -> None:
    await client.load_adapter("shop-v2", AdapterPayload({}, "AAAA"))
    scripted.tensors_field = TENSORS_FIELD_TEXT
    with pytest.raises(EngineUnavailable, match="in another field"):
        await client.load_adapter("shop-v3", AdapterPayload({}, "AAAA"))
    await client.load_adapter("shop-v3", AdapterPayload({}, "AAAA"))
    assert scripted.payloads[-1][TENSORS_FIELD_TEXT] == "AAAA"


async def test_engine_without_adapter_upload_is_unavailable(client: EngineClient, scripted: ScriptedEngine) -> None:
    scripted.tensors_field = "something_else"
    with pytest.raises(EngineUnavailable, match="ATTUNE_ENGINE__ADAPTER_DELIVERY"):
        await client.load_adapter("shop-v2", AdapterPayload({}, "AAAA"))


async def test_adapter_upload_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "ADAPTER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setitem(client_module.TENSORS_FIELDS, url, TENSORS_FIELD_LIST)
        client = SGLangClient(url)
        async with asyncio.timeout(60):
            with pytest.raises(EngineUnavailable, match="in time"):
                await client.load_adapter("shop-v2", AdapterPayload({}, "A" * 30_000_000))
        await client.aclose()


async def test_refused_tensors_are_an_error(client: EngineClient, scripted: ScriptedEngine) -> None:
    scripted.load_fails = True
    with pytest.raises(EngineRefused):
        await client.load_adapter("shop-v2", AdapterPayload({}, "AAAA"))


async def test_unloading_is_idempotent(client: EngineClient) -> None:
    await client.unload_adapter("shop-v1")
    await client.unload_adapter("shop-v1")
    assert await client.list_adapters() == set()


async def test_failed_load_is_an_error(client: EngineClient, scripted: ScriptedEngine) -> None:
    scripted.load_fails = True
    with pytest.raises(EngineRefused, match="cannot be loaded"):
        await client.load_adapter("shop-v2", Path("/versions/shop-v2"))


async def test_scores_equal_captured_log_probs_for_same_adapter_only(client: EngineClient, make_call: MakeCall) -> None:
    capture = (await client.complete(make_call(adapter="shop-v1"))).capture
    ids = capture.prompt_ids + capture.output_ids
    [scored], [other] = await client.score("shop-v1", [ids]), await client.score(None, [ids])
    num_tokens = len(capture.output_ids)
    assert scored[-num_tokens:] == capture.logprobs and other[-num_tokens:] != capture.logprobs


async def test_single_token_cannot_be_scored(client: EngineClient) -> None:
    with pytest.raises(ValueError, match="two tokens"):
        await client.score(None, [[1, 2, 3], [1]])
