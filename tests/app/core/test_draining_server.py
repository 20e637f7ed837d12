"""An API process that is told to stop: /readyz is false first, requests are answered meanwhile, streams end."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import httpx2
import pytest
import uvicorn

from app.core import draining_server
from app.core.draining_server import DrainingServer
from app.core.settings import Settings
from tests.support.deployment import Harness
from tests.support.engine_fixture import free_port
from tests.support.processes import wait_until_live
from tests.support.scripted_engine import ScriptedEngine

CHAT = {"model": "shop", "messages": [{"role": "user", "content": "When are you open?"}]}
DELAY_SECONDS = 600.0  # the tests end it with a second SIGTERM


@pytest.fixture
def process(harness: Harness, scripted: ScriptedEngine) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Yield a process of `attune serve` on the harness's database, and its URL."""
    settings: Settings = harness.settings
    port = free_port()
    values = {"HOME": settings.home, "DATABASE__URL": settings.database_url, "POLICY": "shop", "SERVER__PORT": port}
    values |= {"SERVER__SHUTDOWN_DELAY_SECONDS": DELAY_SECONDS}
    environment = {**os.environ, **{f"ATTUNE_{name}": str(value) for name, value in values.items()}}
    process = subprocess.Popen([sys.executable, "-m", "app.cli.main", "serve"], env=environment)
    url = f"http://127.0.0.1:{port}"
    wait_until_live(url)
    yield process, url
    process.kill()
    process.wait()


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_stopping_process_leaves_the_load_balancer_and_ends_its_streams(
    harness: Harness, scripted: ScriptedEngine, process: tuple[subprocess.Popen[bytes], str]
) -> None:
    child, url = process
    scripted.is_blocked = lambda reply: len(reply.output_ids) > 1
    headers = {"authorization": f"Bearer {harness.key}"}
    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=60, trust_env=False) as client:
        assert (await client.get("/readyz")).status_code == 200
        async with client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as stream:
            lines = stream.aiter_lines()
            first = await anext(lines)
            child.send_signal(signal.SIGTERM)
            while (answer := await client.get("/readyz")).status_code == 200:
                await asyncio.sleep(0.02)
            assert answer.json()["error"]["message"] == "This process is stopping."
            answer = await client.get("/v1/policies")
            assert answer.status_code == 200 and answer.headers["connection"] == "close", "new requests are answered"
            child.send_signal(signal.SIGTERM)
            with pytest.raises(httpx2.TransportError):
                while await client.get("/livez"):
                    await asyncio.sleep(0.02)
            scripted.is_blocked = lambda reply: False  # the reply outlasts the delay
            rest = [line async for line in lines]
        assert first and rest[-2:] and "data: [DONE]" in rest, "the stream has ended and was not cut"
        child.wait(60)
    turn = await harness.wait_for_turn()
    assert turn.finish_reason == "stop"


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_stopping_process_ends_its_event_streams(
    harness: Harness, process: tuple[subprocess.Popen[bytes], str]
) -> None:
    child, url = process
    headers = {"authorization": f"Bearer {harness.key}"}
    async with (
        httpx2.AsyncClient(base_url=url, headers=headers, timeout=60, trust_env=False) as client,
        client.stream("GET", "/v1/events/stream") as stream,
    ):
        lines = stream.aiter_lines()
        assert await anext(lines) == "retry: 1000"
        child.send_signal(signal.SIGTERM)
        assert [line async for line in lines if line] == []  # its end is that of a complete response
        child.send_signal(signal.SIGTERM)
    assert child.wait(60) in (0, -signal.SIGTERM)


async def test_server_stops_by_itself_after_the_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(draining_server, "time", SimpleNamespace(monotonic=lambda: clock.seconds))
    server = DrainingServer(uvicorn.Config("app.main:create_app"), delay_seconds=2.0)
    server.started = True
    server.handle_exit(signal.SIGTERM, None)
    clock.seconds += 1.5
    assert not await server.on_tick(1)
    clock.seconds += 0.5
    assert await server.on_tick(1)
