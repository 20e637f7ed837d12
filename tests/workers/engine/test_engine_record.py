"""The engine's record in the database: an engine takes traffic only when it has loaded the serving version."""

from pathlib import Path

import httpx2

from app.models import Engine, EngineState
from tests.support.deployment import Harness
from tests.support.trained_versions import publish
from workers.engine.engine_record import DatabaseEngineRecord


async def chat(harness: Harness) -> httpx2.Response:
    body = {"model": "shop", "messages": [{"role": "user", "content": "hi"}]}
    return await harness.api.post("/v1/chat/completions", json=body)


async def test_restarted_engine_takes_no_traffic_until_it_has_loaded_the_serving_version(harness: Harness) -> None:
    await publish(harness)
    serving = await publish(harness)
    record = DatabaseEngineRecord(harness.db, harness.settings, "http://127.0.0.1:9")
    incarnation = await record.record_start()
    [engine] = await harness.all(Engine)
    assert (incarnation, engine.state, engine.loaded) == (2, EngineState.STARTING, [])
    assert (await chat(harness)).json()["error"]["message"] == "No engine is ready; try again in a moment."
    assert [adapter.name for adapter in await record.read_wanted_versions()] == ["shop-v1", "shop-v2"]
    assert not await record.try_mark_ready(incarnation, ["shop-v1"], {}), "the serving version is missing"
    assert await record.try_mark_ready(incarnation, ["shop-v1", "shop-v2"], {})
    [engine] = await harness.all(Engine)
    assert (engine.state, engine.loaded) == (EngineState.READY, ["shop-v1", serving.adapter_name])


async def test_damaged_older_version_does_not_keep_the_engine_down(harness: Harness) -> None:
    await publish(harness)
    await publish(harness)
    record = DatabaseEngineRecord(harness.db, harness.settings, "http://127.0.0.1:9")
    assert await record.try_mark_ready(await record.record_start(), ["shop-v2"], {})


async def test_ready_file_exists_while_the_engine_takes_traffic(harness: Harness, tmp_path: Path) -> None:
    await publish(harness)
    file = tmp_path / "ready"
    file.touch()  # of a process that was killed
    record = DatabaseEngineRecord(harness.db, harness.settings, "http://127.0.0.1:9", file)
    incarnation = await record.record_start()
    assert not file.exists()
    assert not await record.try_mark_ready(incarnation, [], {}) and not file.exists(), "the serving version is missing"
    assert await record.try_mark_ready(incarnation, ["shop-v1"], {}) and file.exists()
    await record.mark_down(incarnation, "it is stopped when its replies have ended")
    assert not file.exists()


async def test_old_incarnation_cannot_write(harness: Harness) -> None:
    record = DatabaseEngineRecord(harness.db, harness.settings, "http://127.0.0.1:9")
    old = await record.record_start()
    new = await record.record_start()
    await record.record_heartbeat(old)
    await record.mark_down(old, "a late report")
    [engine] = await harness.all(Engine)
    assert (engine.incarnation, engine.state) == (new, EngineState.STARTING)
    assert not await record.try_mark_ready(old, ["shop-v1"], {})
    assert (await harness.all(Engine))[0].loaded == []
