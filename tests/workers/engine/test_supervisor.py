"""The supervisor, with a fake of SGLang that starts in half a second."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sized
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from sqlalchemy.exc import OperationalError

from app.inference.engine import Completion
from app.inference.request import ChatCall, Sampling
from app.inference.sglang.client import SGLangClient
from app.inference.transport import EngineRefused, EngineUnavailable
from tests.support.engine_fixture import DEMO_MODEL, REPOSITORY, InMemoryEngineRecord, engine_spec, wait_for_event
from tests.workers.engine.supervisor_process import run_supervisor_process
from workers.engine.process import EngineSpec
from workers.engine.supervisor import Supervisor, SupervisorTimeouts
from workers.engine.version_files import VersionRef, local_versions

TEST_TIMEOUTS = SupervisorTimeouts(  # short intervals; the time-outs are long, because a loaded machine is slow
    heartbeat_interval=0.05,
    response_timeout=60.0,
    probe_interval=0.2,
    probe=60.0,
    progress_interval=0.1,
    retry_interval=0.05,
    min_restart_interval=0.05,
    max_restart_interval=0.4,
    route_change=0.2,
)
SHORT_TIMEOUTS = replace(TEST_TIMEOUTS, response_timeout=1.5, probe=1.0)
SECONDS = 60.0
RunSupervisor = Callable[..., AbstractAsyncContextManager[Supervisor]]


@pytest.fixture
def record() -> InMemoryEngineRecord:
    return InMemoryEngineRecord()


@pytest.fixture
def reports() -> list[str]:
    return []


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineSpec:
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.workers.engine.fake_server "$@"\n')
    interpreter.chmod(0o755)
    monkeypatch.setenv("SGLANG_FAKE_FOLDER", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    return replace(engine_spec(tmp_path, DEMO_MODEL), python=interpreter)


@pytest.fixture
def run_supervisor(spec: EngineSpec, record: InMemoryEngineRecord, reports: list[str]) -> RunSupervisor:
    @asynccontextmanager
    async def run(
        check: Callable[[Path, str], None] = lambda path, sha256: None, timeouts: SupervisorTimeouts = TEST_TIMEOUTS
    ) -> AsyncIterator[Supervisor]:
        supervisor = Supervisor(spec, record, local_versions(check), report=reports.append, timeouts=timeouts)
        running = asyncio.create_task(supervisor.run())
        yield supervisor
        supervisor.stop()
        await asyncio.wait_for(running, SECONDS)

    return run


def ref(name: str) -> VersionRef:
    return VersionRef(name, Path("/versions") / name, "0" * 64)


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.02)


async def wait_for_more_than(count: int, items: Sized) -> None:
    await wait_until(lambda: len(items) > count)


def is_ready(record: InMemoryEngineRecord) -> bool:
    return bool(record.events) and record.events[-1].startswith("ready")


def accepts_connections(spec: EngineSpec) -> bool:
    with socket.socket() as client:
        return client.connect_ex((spec.host, spec.port)) == 0


async def test_wanted_adapters_are_loaded_before_the_engine_is_ready(
    run_supervisor: RunSupervisor, record: InMemoryEngineRecord, tmp_path: Path
) -> None:
    record.wanted_versions = [ref("shop-v1"), ref("shop-v2")]
    async with run_supervisor():
        await wait_for_event(record, "ready 1", SECONDS)
    assert record.loaded == ["shop-v1", "shop-v2"]
    assert (tmp_path / "loads").read_text().split() == ["shop-v1", "shop-v2"]


async def test_adapter_added_during_the_start_is_loaded_before_the_engine_is_ready(
    run_supervisor: RunSupervisor, record: InMemoryEngineRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_reads = 0

    async def read_and_add_versions() -> list[VersionRef]:
        nonlocal num_reads
        num_reads += 1
        before = list(record.wanted_versions)
        record.wanted_versions = [ref("shop-v1"), ref("shop-v2")]
        return before

    monkeypatch.setattr(record, "read_wanted_versions", read_and_add_versions)
    async with run_supervisor():
        await wait_for_event(record, "ready 1", SECONDS)
    assert num_reads == 2 and record.loaded == ["shop-v1", "shop-v2"]


async def test_damaged_adapter_never_reaches_the_engine(
    run_supervisor: RunSupervisor, record: InMemoryEngineRecord, reports: list[str], tmp_path: Path
) -> None:
    record.wanted_versions = [ref("shop-v1"), ref("shop-v2")]

    def check(path: Path, sha256: str) -> None:
        if path.name == "shop-v1":
            raise ValueError("adapter_model.safetensors was changed")

    async with run_supervisor(check):
        await wait_for_event(record, "ready 1", SECONDS)
    assert "shop-v1 is not loaded: adapter_model.safetensors was changed" in reports
    assert record.errors == {"shop-v1": "adapter_model.safetensors was changed"} and record.loaded == ["shop-v2"]
    assert (tmp_path / "loads").read_text().split() == ["shop-v2"]


async def test_adapter_that_the_engine_refuses_at_its_first_use_does_not_restart_the_engine(
    run_supervisor: RunSupervisor, record: InMemoryEngineRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    record.wanted_versions = [ref("shop-v1"), ref("shop-v2")]
    warm_up = SGLangClient.warm_up_adapter

    async def refuse_first(client: SGLangClient, name: str) -> None:
        if name == "shop-v1":
            raise EngineRefused(400, "its rank is too large")
        await warm_up(client, name)

    monkeypatch.setattr(SGLangClient, "warm_up_adapter", refuse_first)
    async with run_supervisor():
        await wait_until(lambda: bool(record.events) and not record.events[-1].startswith("start"))
    assert record.loaded == ["shop-v2"] and "its rank is too large" in record.errors["shop-v1"]


async def test_dead_engine_is_restarted_with_its_adapters(
    run_supervisor: RunSupervisor, record: InMemoryEngineRecord, spec: EngineSpec, tmp_path: Path
) -> None:
    record.wanted_versions = [ref("shop-v1")]
    async with run_supervisor():
        await wait_for_event(record, "ready 1", SECONDS)
        os.kill(engine_pid(spec), signal.SIGKILL)
        await wait_for_event(record, "ready 2", SECONDS)
    assert record.events[2].startswith("down 1: the engine was killed by signal 9")
    assert record.events[-1] == "down 2: stopped"
    assert (tmp_path / "loads").read_text().split() == ["shop-v1", "shop-v1"]


async def test_dead_engine_without_its_log_is_restarted(
    run_supervisor: RunSupervisor, record: InMemoryEngineRecord, spec: EngineSpec
) -> None:
    async with run_supervisor():
        await wait_for_event(record, "ready 1", SECONDS)
        spec.log_path.unlink()
        os.kill(engine_pid(spec), signal.SIGKILL)
        await wait_for_event(record, "ready 2", SECONDS)
    assert "No such file" in record.events[2]


async def test_lost_child_process_ends_the_engine(
    run_supervisor: RunSupervisor, record: InMemoryEngineRecord, spec: EngineSpec
) -> None:
    async with run_supervisor():
        for incarnation in (1, 2):
            await wait_for_event(record, f"ready {incarnation}", SECONDS)
            [scheduler] = psutil.Process(engine_pid(spec)).children()
            await asyncio.sleep(2.0)  # meanwhile, short-lived processes with its name start and end
            assert record.events[-1].startswith(f"ready {incarnation}")
            scheduler.kill()
        await wait_for_event(record, "ready 3", SECONDS)
    ends = [entry for entry in record.events if entry.startswith("down")]
    assert ends[:2] == [f"down {number}: the engine lost its process sglang::scheduler" for number in (1, 2)]


@pytest.mark.parametrize("stable_after", [0.0, 600.0])
async def test_restart_interval_grows_only_after_short_runs(
    run_supervisor: RunSupervisor,
    record: InMemoryEngineRecord,
    spec: EngineSpec,
    stable_after: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timeouts = replace(TEST_TIMEOUTS, max_restart_interval=60.0, stable_after=stable_after)
    pauses: list[float] = []
    pause = Supervisor._pause

    async def record_pause(supervisor: Supervisor, seconds: float) -> None:
        pauses.append(seconds)
        await pause(supervisor, seconds)

    monkeypatch.setattr(Supervisor, "_pause", record_pause)
    async with run_supervisor(timeouts=timeouts):
        while len(pauses) < 8 or (stable_after and max(pauses) == timeouts.min_restart_interval):
            await wait_for_event(record, f"ready {len(pauses) + 1}", SECONDS)
            await asyncio.sleep(2 * timeouts.heartbeat_interval)
            num_pauses = len(pauses)
            os.kill(engine_pid(spec), signal.SIGKILL)
            await wait_for_more_than(num_pauses, pauses)
    # Pauses double and begin at the last start. In the end they are longer than a start takes.
    assert stable_after or set(pauses[:8]) == {timeouts.min_restart_interval}


async def test_silent_http_server_is_a_hang(
    run_supervisor: RunSupervisor, record: InMemoryEngineRecord, tmp_path: Path
) -> None:
    async with run_supervisor(timeouts=SHORT_TIMEOUTS):
        await wait_until(lambda: is_ready(record))
        num_events = len(record.events)
        (tmp_path / "mute").touch()
        await wait_for_more_than(num_events, record.events)
        (tmp_path / "mute").unlink()
        await wait_until(lambda: is_ready(record))
    assert "silent" in record.events[num_events] or "no token" in record.events[num_events]


async def test_stuck_scheduler_behind_a_live_http_server_is_a_hang(
    run_supervisor: RunSupervisor, record: InMemoryEngineRecord, tmp_path: Path
) -> None:
    timeouts = replace(TEST_TIMEOUTS, probe=1.0)
    async with run_supervisor(timeouts=timeouts):
        await wait_until(lambda: is_ready(record))
        num_events = len(record.events)
        (tmp_path / "stuck").touch()
        await wait_for_more_than(num_events, record.events)
        (tmp_path / "stuck").unlink()
        await wait_until(lambda: is_ready(record))
    assert "no token came within 1 s" in record.events[num_events]


@pytest.mark.parametrize("is_brief", [True, False])
async def test_refused_probe_is_repeated_before_the_engine_is_restarted(
    run_supervisor: RunSupervisor, record: InMemoryEngineRecord, tmp_path: Path, is_brief: bool
) -> None:
    probes = tmp_path / "refused-probes"
    async with run_supervisor(timeouts=replace(TEST_TIMEOUTS, probe=60.0 if is_brief else 1.0)):
        await wait_for_event(record, "ready 1", SECONDS)
        (tmp_path / "unhealthy").touch()
        await wait_until(lambda: probes.exists() and probes.stat().st_size > 2)
        if not is_brief:
            await wait_until(lambda: len(record.events) > 2)
        (tmp_path / "unhealthy").unlink()
        await asyncio.sleep(10 * TEST_TIMEOUTS.heartbeat_interval)
    assert ("stopped" if is_brief else "no token came within 1 s") in record.events[2]


async def test_engine_that_cannot_start_is_retried_with_backoff(
    run_supervisor: RunSupervisor, record: InMemoryEngineRecord, tmp_path: Path
) -> None:
    (tmp_path / "exit").touch()
    async with run_supervisor():
        await wait_until(lambda: record.incarnation >= 3)
        (tmp_path / "exit").unlink()
        await wait_until(lambda: record.events[-1].startswith("ready"))
    assert record.events[1] == "down 1: the engine exited with code 1; its last log line: there is no such model"


async def test_port_in_use_is_reported(
    run_supervisor: RunSupervisor, record: InMemoryEngineRecord, spec: EngineSpec
) -> None:
    with socket.create_server((spec.host, spec.port)):
        async with run_supervisor():
            await wait_until(lambda: record.incarnation >= 2)
    assert f"cannot listen on {spec.host}:{spec.port}" in record.events[1]


async def test_stop_during_the_start_leaves_no_process(
    run_supervisor: RunSupervisor, record: InMemoryEngineRecord, spec: EngineSpec, reports: list[str], tmp_path: Path
) -> None:
    (tmp_path / "mute").touch()
    async with run_supervisor():
        await wait_until(lambda: any("engine starting" in line for line in reports))
    assert record.events == ["starting 1", "down 1: stopped"] and not accepts_connections(spec)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_the_supervisor_cleanly(spec: EngineSpec, tmp_path: Path, number: signal.Signals) -> None:
    with run_supervisor_process(tmp_path, DEMO_MODEL, spec.python) as (process, port, lines):
        assert any("engine ready" in line for line in lines)
        process.send_signal(number)
        assert "engine down: stopped\n" in lines
    assert process.returncode == 0
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", port)) != 0


@asynccontextmanager
async def running_reply(spec: EngineSpec) -> AsyncIterator[asyncio.Task[Completion]]:
    """Let the engine generate a reply of three seconds."""
    async with aclosing(SGLangClient(spec.url, spec.api_key, spec.admin_key)) as client:
        call = ChatCall(
            rid="chatcmpl-1", messages=[{"role": "user", "content": "hi"}], sampling=Sampling(max_tokens=30)
        )
        reply = asyncio.create_task(client.complete(call))
        async with asyncio.timeout(SECONDS):
            while not await client.count_running():
                await asyncio.sleep(0.02)
        yield reply


async def test_stopped_engine_takes_no_traffic_and_its_replies_end(
    run_supervisor: RunSupervisor, record: InMemoryEngineRecord, spec: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_FAKE_SECONDS_PER_TOKEN", "0.1")
    async with run_supervisor() as supervisor:
        await wait_for_event(record, "ready 1", SECONDS)
        async with running_reply(spec) as reply:
            supervisor.stop()
            await wait_until(lambda: record.events[-1] == "down 1: it is stopped when its replies have ended")
            assert not reply.done()
            assert len((await asyncio.wait_for(reply, SECONDS)).capture.output_ids) > 3
    assert record.events[-1] == "down 1: stopped"


async def test_second_stop_does_not_wait_for_replies(
    run_supervisor: RunSupervisor, record: InMemoryEngineRecord, spec: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_FAKE_SECONDS_PER_TOKEN", "1000")
    async with run_supervisor() as supervisor:
        await wait_for_event(record, "ready 1", SECONDS)
        async with running_reply(spec) as reply:
            supervisor.stop()
            await wait_until(lambda: record.events[-1].startswith("down"))
            supervisor.stop()
            with pytest.raises(EngineUnavailable):
                await asyncio.wait_for(reply, SECONDS)


async def test_database_outage_does_not_stop_the_engine(
    run_supervisor: RunSupervisor, record: InMemoryEngineRecord, reports: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_supervisor():
        await wait_for_event(record, "ready 1", SECONDS)

        async def raise_outage(incarnation: int) -> None:
            raise OperationalError("UPDATE engines", {}, OSError("the database is down"))

        with monkeypatch.context() as patch:
            patch.setattr(record, "record_heartbeat", raise_outage)
            await wait_until(lambda: any("the database is down" in line for line in reports))
        num_heartbeats = record.num_heartbeats
        await wait_until(lambda: record.num_heartbeats > num_heartbeats)
    assert record.incarnation == 1


async def test_keys_are_not_in_flags_and_the_log_is_private(
    run_supervisor: RunSupervisor, record: InMemoryEngineRecord, spec: EngineSpec
) -> None:
    async with run_supervisor():
        await wait_for_event(record, "ready 1", SECONDS)
        flags = Path(f"/proc/{engine_pid(spec)}/cmdline").read_bytes().decode()
    assert spec.api_key not in flags and spec.admin_key not in flags
    assert spec.api_key not in repr(spec) and spec.admin_key not in repr(spec)
    assert spec.log_path.stat().st_mode & 0o077 == 0


def engine_pid(spec: EngineSpec) -> int:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            flags = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # it has just ended
        if f"--port={spec.port}".encode() in flags:
            return int(folder.name)
    raise AssertionError(f"no process listens on port {spec.port}")
