"""The supervisor with the real engine: killed, stuck or orphaned engines. Each start takes 10 to 30 seconds."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from app.inference.request import ChatCall
from app.inference.sglang.client import SGLangClient
from tests.support.engine_adapters import ReferenceWeights
from tests.support.engine_fixture import (
    UNCHECKED,
    InMemoryEngineRecord,
    engine_spec,
    require_engine_environment,
    wait_for_event,
)
from tests.workers.engine.supervisor_process import run_supervisor_process
from workers.engine.supervisor import Supervisor, SupervisorTimeouts
from workers.engine.version_files import VersionRef

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def log_writers(log_path: Path) -> dict[int, str]:
    """Return the command of every live process that writes to this log, by process id."""
    commands = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            # A process without a command is a zombie, or is about to become one.
            if command and os.readlink(folder / "fd" / "1") == str(log_path):
                commands[int(folder.name)] = command
        except OSError:
            continue  # it has just ended, or belongs to another user
    return commands


def wait_for_survivors(log_path: Path, port: int, seconds: float) -> list[str]:
    """Wait at most `seconds` until all processes have ended. Return the remaining ones and the port's listener."""
    deadline = time.monotonic() + seconds
    while (survivors := list_survivors(log_path, port)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return survivors


def list_survivors(log_path: Path, port: int) -> list[str]:
    """Return the live processes and the port's listener: a process that exits loses its command before its sockets."""
    with socket.socket() as client:
        listener = [f"a listener on {port}"] if client.connect_ex(("127.0.0.1", port)) == 0 else []
    return [*log_writers(log_path).values(), *listener]


@pytest.mark.slow
async def test_killed_or_stuck_engine_restarts_with_its_wanted_versions(
    engine_model: Path, tmp_path: Path, make_call: Callable[..., ChatCall]
) -> None:
    require_engine_environment()
    path = ReferenceWeights(engine_model, tmp_path).adapter("shop-v1", seed=1)
    spec, record = engine_spec(tmp_path, engine_model), InMemoryEngineRecord([VersionRef("shop-v1", path, "0" * 64)])
    timeouts = SupervisorTimeouts(probe_interval=1.0, probe=6.0, min_restart_interval=0.1)
    supervisor = Supervisor(spec, record, UNCHECKED, timeouts=timeouts)
    running = asyncio.create_task(supervisor.run())
    client = SGLangClient(spec.url, spec.api_key, spec.admin_key)
    for incarnation in (1, 2, 3, 4):
        await wait_for_event(record, f"ready {incarnation}")
        assert await client.list_adapters() == {"shop-v1"} and record.loaded == ["shop-v1"]
        completion = await client.complete(make_call(adapter="shop-v1", max_tokens=8))
        assert completion.capture.exclusion_reason is None
        members = log_writers(spec.log_path)
        assert len(members) >= 3, members
        if incarnation == 1:
            os.kill(next(pid for pid, name in members.items() if "attune_sglang_cpu.launch" in name), signal.SIGKILL)
        if incarnation == 2:
            os.kill(next(pid for pid, name in members.items() if "scheduler" in name), signal.SIGSTOP)
        if incarnation == 3:  # only a child process, after which the main process does not always end
            os.kill(next(pid for pid, name in members.items() if "detokenizer" in name), signal.SIGKILL)
            killed_at = time.monotonic()
            while not any(entry.startswith("down 3") for entry in record.events):
                assert time.monotonic() - killed_at < timeouts.response_timeout
                await asyncio.sleep(0.05)
    supervisor.stop()
    await running
    await client.aclose()
    assert wait_for_survivors(spec.log_path, spec.port, 5.0) == []
    assert "killed by signal 9" in record.events[2] and "no token came" in record.events[5]
    log = spec.log_path.read_text()
    assert spec.api_key not in log and spec.admin_key not in log


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["engine starting", "engine ready"])
def test_engine_ends_with_a_killed_supervisor(engine_model: Path, tmp_path: Path, moment: str) -> None:
    require_engine_environment()
    with run_supervisor_process(tmp_path, engine_model) as (supervisor, port, lines):
        assert any(moment in line for line in lines)
        assert log_writers(tmp_path / "engine.log")
        supervisor.kill()
    assert wait_for_survivors(tmp_path / "engine.log", port, 60.0) == []
