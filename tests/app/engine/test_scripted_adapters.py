"""Adapters of a scripted engine: loading is idempotent, scoring gives back what was captured."""

from pathlib import Path

import pytest

from app.engine.errors import EngineRefused


async def test_loading_what_is_held_already_is_no_error(client) -> None:
    await client.load_adapter("shop-v2", Path("/versions/shop-v2"))
    await client.load_adapter("shop-v2", Path("/versions/shop-v2"))
    assert await client.adapters() == {"shop-v1", "shop-v2"}


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
