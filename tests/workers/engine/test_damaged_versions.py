"""A damaged version of one tenant: the engine opens without it, and only that tenant's requests are refused."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx2
import pytest

from alignment.artifacts.specs import ADAPTER
from app.engines import load_errors
from app.inference.keys import load_engine_keys
from app.models import Audit, Engine, Version
from app.projects.service import create_project
from tests.support.deployment import Harness
from tests.support.engine_fixture import DEMO_MODEL, REPOSITORY, engine_spec
from tests.support.scripted_engine import ScriptedEngine
from tests.support.trained_versions import publish
from tests.workers.engine.test_supervisor import SECONDS, TEST_TIMEOUTS
from tests.workers.release.test_publish import export_values
from workers.base_model import check_adapter_files
from workers.engine.engine_record import DatabaseEngineRecord
from workers.engine.supervisor import Supervisor
from workers.engine.version_files import VersionOpener, local_versions
from workers.release.adapter_sync import sync_adapters


@asynccontextmanager
async def run_engine(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opener: VersionOpener | None = None
) -> AsyncIterator[list[str]]:
    """Run a supervised fake engine on the harness's database. Yield its reports."""
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.workers.engine.fake_server "$@"\n')
    interpreter.chmod(0o755)
    monkeypatch.setenv("SGLANG_FAKE_FOLDER", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    keys, reports = load_engine_keys(harness.settings), list[str]()
    spec = replace(engine_spec(tmp_path, DEMO_MODEL), python=interpreter, api_key=keys.api, admin_key=keys.admin)
    record = DatabaseEngineRecord(harness.db, harness.settings, spec.url)
    opener = opener or local_versions(partial(check_adapter_files, harness.settings))
    # SQLite has one writer, and who waits for it polls. On a disk whose fsync takes seconds, heartbeats without a pause
    # keep the API from writing for the 15 s after which it answers 503.
    timeouts = replace(TEST_TIMEOUTS, unreadable=0.2, heartbeat_interval=0.5)
    supervisor = Supervisor(spec, record, opener, report=reports.append, timeouts=timeouts)
    running = asyncio.create_task(supervisor.run())
    try:
        async with asyncio.timeout(SECONDS):
            while not any("engine ready" in line for line in reports):
                assert not running.done(), reports
                await asyncio.sleep(0.02)
        yield reports
    finally:
        supervisor.stop()
        await asyncio.wait_for(running, SECONDS)


async def publish_exported(harness: Harness) -> Version:
    """Publish a version that has real files."""
    version = await publish(harness, loaded=False)
    async with harness.db.write() as session:
        row = await session.get_one(Version, version.id)
        for name, value in export_values(harness, row.adapter_name or "", row.number).items():
            setattr(row, name, value)
    return row


async def chat(harness: Harness, model: str = "shop", key: str | None = None) -> httpx2.Response:
    await asyncio.sleep(2 * harness.settings.server.route_cache_seconds)
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return await harness.api.post("/v1/chat/completions", json=body, headers=headers)


async def wait_for_heartbeat(harness: Harness) -> None:
    """Wait for two heartbeats after now."""
    for _ in range(2):
        before = (await harness.get(Engine, "engine-0")).heartbeat_at
        async with asyncio.timeout(SECONDS):
            while (await harness.get(Engine, "engine-0")).heartbeat_at == before:
                await asyncio.sleep(0.02)


async def test_engine_opens_without_a_damaged_version_and_takes_it_when_it_is_repaired(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = await publish_exported(harness)
    async with harness.db.write() as session:
        _, other_key = await create_project(session, "other", "desk", harness.settings.model)
    file = Path(version.adapter_path or "") / ADAPTER
    intact = file.read_bytes()
    file.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
    async with run_engine(harness, tmp_path, monkeypatch):
        await wait_for_heartbeat(harness)
        assert (await chat(harness, "desk", other_key)).status_code == 200
        refused = await chat(harness)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "version_not_loadable")
        assert "shop@v1" in refused.json()["error"]["message"] and str(file.parent) not in refused.text
        assert (await harness.api.get("/readyz")).json() == {
            "status": "ready",
            "engines": ["engine-0"],
            "unloadable_versions": 1,
        }
        [engine] = (await harness.api.get("/v1/status")).json()["engines"]
        assert ADAPTER in engine["not_loaded"]["shop-v1"] and engine["reason"] is None
        other = await harness.api.get("/v1/status", headers={"authorization": f"Bearer {other_key}"})
        assert other.json()["engines"][0]["not_loaded"] == {} and "shop-v1" not in other.text
        await sync_adapters(harness.db, harness.settings)
        assert (await chat(harness)).status_code == 503

        file.write_bytes(intact)
        await sync_adapters(harness.db, harness.settings)
        assert (await chat(harness)).headers["x-policy-version"] == "shop@v1"
        assert (await harness.api.get("/v1/status")).json()["engines"][0]["not_loaded"] == {}
        assert "unloadable_versions" not in (await harness.api.get("/readyz")).json()


async def test_version_whose_files_cannot_be_read_keeps_the_engine_closed_for_a_bounded_time(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The storage may be back in a moment. If it is not, the other tenants are served without this version."""
    await publish_exported(harness)

    def raise_error(path: Path, sha256: str) -> None:
        raise OSError(5, "Input/output error")

    async with run_engine(harness, tmp_path, monkeypatch, local_versions(raise_error)) as reports:
        answer = await chat(harness, "shop@v0")
        assert answer.status_code == 200, (answer.text, await harness.get(Engine, "engine-0"), reports)
        assert (await chat(harness)).json()["error"]["code"] == "version_not_loadable"


async def test_version_that_crashes_the_engine_twice_is_not_loaded_again_until_an_operator_asks(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = await publish_exported(harness)
    async with harness.db.write() as session:
        _, other_key = await create_project(session, "other", "desk", harness.settings.model)
    crash = tmp_path / "crash"
    crash.write_text(version.adapter_name or "")
    async with run_engine(harness, tmp_path, monkeypatch) as reports:
        await wait_for_heartbeat(harness)
        assert sum("engine down" in line and "shop-v1" in line for line in reports) == 2
        assert (await chat(harness, "desk", other_key)).status_code == 200
        assert (await chat(harness)).json()["error"]["code"] == "version_not_loadable"
        [engine] = (await harness.api.get("/v1/status")).json()["engines"]
        assert "attune versions retry shop-v1" in engine["not_loaded"]["shop-v1"]
        incarnation = (await harness.get(Engine, "engine-0")).incarnation
        await sync_adapters(harness.db, harness.settings)
        await wait_for_heartbeat(harness)
        assert (await harness.get(Engine, "engine-0")).incarnation == incarnation
    async with run_engine(harness, tmp_path, monkeypatch) as reports:  # its supervisor remembers what another has seen
        await wait_for_heartbeat(harness)
        assert not any("engine down" in line for line in reports)
        assert (await chat(harness)).json()["error"]["code"] == "version_not_loadable"

        crash.unlink()
        async with harness.db.write() as session:
            assert await load_errors.retry(session, "shop-v1", actor="operator") == 1
        await sync_adapters(harness.db, harness.settings)
        assert (await chat(harness)).headers["x-policy-version"] == "shop@v1"
    [entry] = [row for row in await harness.all(Audit) if row.action == "version.load_retried"]
    assert (entry.actor, entry.subject) == ("operator", "shop-v1")


async def test_crashes_are_forgotten_when_the_version_is_loaded_or_has_other_files(harness: Harness) -> None:
    version = await publish_exported(harness)
    record = DatabaseEngineRecord(harness.db, harness.settings, "http://127.0.0.1:9")

    async def crash() -> int:
        """Record a crash while the version was loaded. Return how many the next start knows."""
        incarnation = await record.record_start()
        [ref] = await record.read_wanted_versions()
        await record.record_load_crash(incarnation, ref)
        return (await record.read_wanted_versions())[0].crashes

    assert [await crash(), await crash()] == [1, 2]
    async with harness.db.write() as session:
        (await session.get_one(Version, version.id)).manifest_sha256 = "f" * 64
    assert await crash() == 1
    assert await record.try_mark_ready(await record.record_start(), ["shop-v1"], {})
    assert (await record.read_wanted_versions())[0].crashes == 0


async def test_api_is_not_ready_when_no_serving_version_can_be_loaded(harness: Harness) -> None:
    await publish(harness, loaded=False)
    record = DatabaseEngineRecord(harness.db, harness.settings, "http://127.0.0.1:9")
    assert await record.try_mark_ready(await record.record_start(), [], {"shop-v1": "it is damaged"})
    assert (await harness.api.get("/readyz")).status_code == 503


async def test_pinned_users_are_answered_while_the_serving_version_is_damaged(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    first = await publish(harness)
    await publish(harness, loaded=False)
    assert (
        await harness.api.put("/v1/policies/shop/pins", json={"kind": "user", "subject": "user-7", "version": 1})
    ).status_code < 300
    async with harness.db.write() as session:
        load_errors.record(await session.get_one(Engine, "engine-0"), "shop-v2", "it is damaged")
    scripted.adapters[first.adapter_name or ""] = "/nowhere"
    body = {"model": "shop", "user": "user-7", "messages": [{"role": "user", "content": "hi"}]}
    assert (await harness.api.post("/v1/chat/completions", json=body)).headers["x-policy-version"] == "shop@v1"


async def test_recorded_error_ends_with_the_version_that_it_is_about(harness: Harness) -> None:
    await publish(harness)
    async with harness.db.write() as session:
        load_errors.record(await session.get_one(Engine, "engine-0"), "shop-v9", "it is damaged")
    await sync_adapters(harness.db, harness.settings)
    assert load_errors.read(await harness.get(Engine, "engine-0")) == {}
