"""Adapters of a scripted engine: loading is idempotent, scoring gives back what was captured."""

import asyncio
import socket
from pathlib import Path

import pytest

from app.inference import client as client_module
from app.inference.client import NEWER, OLDER, Payload
from app.inference.errors import EngineRefused, EngineUnavailable


async def test_loading_what_is_held_already_is_no_error(client) -> None:
    await client.load_adapter("shop-v2", Path("/versions/shop-v2"))
    await client.load_adapter("shop-v2", Path("/versions/shop-v2"))
    assert await client.adapters() == {"shop-v1", "shop-v2"}


@pytest.mark.parametrize("known", [NEWER, OLDER])
async def test_tensors_go_in_the_shape_that_the_engine_knows(client, scripted, known) -> None:
    scripted.tensors = known
    for name in ("shop-v2", "shop-v3"):
        await client.load_adapter(name, Payload({"r": 8}, "AAAA"))
        await client.load_adapter(name, Payload({"r": 8}, "AAAA"))
    assert [body[known] for body in scripted.payloads] == [["AAAA"] if known == NEWER else "AAAA"] * 2
    assert scripted.payloads[1]["config_dict"] == {"r": 8}
    assert await client.adapters() == {"shop-v1", "shop-v2", "shop-v3"}


async def test_an_engine_that_was_exchanged_for_another_release_is_asked_again(client, scripted) -> None:
    await client.load_adapter("shop-v2", Payload({}, "AAAA"))
    scripted.tensors = OLDER
    with pytest.raises(EngineUnavailable, match="another shape"):
        await client.load_adapter("shop-v3", Payload({}, "AAAA"))
    await client.load_adapter("shop-v3", Payload({}, "AAAA"))
    assert scripted.payloads[-1][OLDER] == "AAAA"


async def test_one_that_takes_none_within_the_call_is_not_the_adapters_fault(client, scripted) -> None:
    scripted.tensors = "something_else"
    with pytest.raises(EngineUnavailable, match="ATTUNE_ADAPTER_DELIVERY"):
        await client.load_adapter("shop-v2", Payload({}, "AAAA"))


async def test_one_that_never_takes_all_of_it_is_given_up(monkeypatch) -> None:
    monkeypatch.setattr(client_module, "ADAPTER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        monkeypatch.setitem(client_module.SHAPES, url, NEWER)
        client = client_module.EngineClient(url)
        async with asyncio.timeout(60):
            with pytest.raises(EngineUnavailable, match="in time"):
                await client.load_adapter("shop-v2", Payload({}, "A" * 30_000_000))
        await client.aclose()


async def test_tensors_that_it_refuses_in_either_shape_are_an_error(client, scripted) -> None:
    scripted.load_fails = True
    with pytest.raises(EngineRefused):
        await client.load_adapter("shop-v2", Payload({}, "AAAA"))


async def test_unloading_what_is_gone_already_is_no_error(client) -> None:
    await client.unload_adapter("shop-v1")
    await client.unload_adapter("shop-v1")
    assert await client.adapters() == set()


async def test_a_load_that_fails_is_an_error(client, scripted) -> None:
    scripted.load_fails = True
    with pytest.raises(EngineRefused, match="cannot be loaded"):
        await client.load_adapter("shop-v2", Path("/versions/shop-v2"))


async def test_scoring_gives_back_the_captured_log_probs_under_the_same_adapter_alone(client, make_call) -> None:
    capture = (await client.complete(make_call(adapter="shop-v1"))).capture
    ids = capture.prompt_ids + capture.output_ids
    [scored], [other] = await client.score("shop-v1", [ids]), await client.score(None, [ids])
    said = len(capture.output_ids)
    assert scored[-said:] == capture.logprobs and other[-said:] != capture.logprobs


async def test_a_single_token_cannot_be_scored(client) -> None:
    with pytest.raises(ValueError, match="two tokens"):
        await client.score(None, [[1, 2, 3], [1]])
