"""The supervisor's book on the database: an engine takes traffic only when it holds what serves."""

import httpx2

from app.models import Engine, EngineState
from tests.app.deployments.test_rollback import publish
from tests.support.deployment import Harness
from workers.engine.engine_record import DatabaseLedger


async def chat(harness: Harness) -> httpx2.Response:
    body = {"model": "shop", "messages": [{"role": "user", "content": "hi"}]}
    return await harness.api.post("/v1/chat/completions", json=body)


async def test_an_engine_that_starts_again_takes_no_traffic_until_it_holds_what_serves(harness: Harness) -> None:
    await publish(harness)
    serving = await publish(harness)
    book = DatabaseLedger(harness.db, harness.settings, "http://127.0.0.1:9")
    incarnation = await book.starting()
    [engine] = await harness.all(Engine)
    assert (incarnation, engine.state, engine.loaded) == (2, EngineState.STARTING, [])
    assert (await chat(harness)).json()["error"]["message"] == "No engine is ready; try again in a moment."
    assert [adapter.name for adapter in await book.wanted()] == ["shop-v1", "shop-v2"]
    assert not await book.ready(incarnation, ["shop-v1"]), "what serves is missing"
    assert await book.ready(incarnation, ["shop-v1", "shop-v2"])
    [engine] = await harness.all(Engine)
    assert (engine.state, engine.loaded) == (EngineState.READY, ["shop-v1", serving.adapter_name])


async def test_a_damaged_older_version_does_not_keep_the_door_shut(harness: Harness) -> None:
    await publish(harness)
    await publish(harness)
    book = DatabaseLedger(harness.db, harness.settings, "http://127.0.0.1:9")
    assert await book.ready(await book.starting(), ["shop-v2"])


async def test_an_old_incarnation_has_nothing_to_say(harness: Harness) -> None:
    book = DatabaseLedger(harness.db, harness.settings, "http://127.0.0.1:9")
    old = await book.starting()
    new = await book.starting()
    await book.beat(old)
    await book.down(old, "late news")
    [engine] = await harness.all(Engine)
    assert (engine.incarnation, engine.state) == (new, EngineState.STARTING)
    assert not await book.ready(old, ["shop-v1"])
    assert (await harness.all(Engine))[0].loaded == []
