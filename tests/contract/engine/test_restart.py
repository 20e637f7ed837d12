"""A client outlives its engine: it reaches the one that the supervisor starts at the same address."""

import asyncio
import os
import signal
from contextlib import aclosing
from pathlib import Path

import psutil
import pytest

from app.inference.pool import connect
from app.inference.transport import EngineUnavailable
from tests.contract.engine.conftest import require_environment, spec_of
from tests.contract.engine.served_engines import KINDS
from tests.support.engine_adapters import ReferenceWeights, bias_without_end
from tests.support.engine_fixture import UNCHECKED, InMemoryEngineRecord, wait_for_event
from tests.support.engine_replies import MakeCall
from workers.engine.process import is_alive
from workers.engine.supervisor import Supervisor
from workers.engine.version_files import VersionRef

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("kind", KINDS[1:])
async def test_restarted_engine_holds_its_versions_and_no_process_is_left(
    kind: str, engine_model: Path, tmp_path: Path, make_call: MakeCall
) -> None:
    require_environment(kind)
    path = ReferenceWeights(engine_model, tmp_path).adapter("shop-v1", seed=1)
    record = InMemoryEngineRecord([VersionRef("shop-v1", path, "0" * 64)])
    spec = spec_of(kind, tmp_path, engine_model)
    supervisor = Supervisor(spec, record, UNCHECKED)
    running = asyncio.create_task(supervisor.run())
    async with aclosing(connect(spec, spec.keys)) as client:
        await wait_for_event(record, "ready 1")
        processes = engine_processes(spec.log_path)
        launcher = next(process for process in processes if process.ppid() == os.getpid())
        never_ends = bias_without_end(engine_model)
        call = make_call(adapter="shop-v1", max_tokens=1900, temperature=1.5, logit_bias=never_ends)
        reply = asyncio.create_task(client.complete(call))
        while not await client.count_running():
            await asyncio.sleep(0.02)
        os.kill(launcher.pid, signal.SIGKILL)
        with pytest.raises(EngineUnavailable):
            await reply
        await wait_for_event(record, "ready 2")
        await wait_for_end(processes)
        assert await client.list_adapters() == {"shop-v1"}
        capture = (await client.complete(make_call(adapter="shop-v1", max_tokens=8))).capture
        assert capture.exclusion_reason is None
        processes = engine_processes(spec.log_path)
        supervisor.stop()
        await running
        await wait_for_end(processes)
    log = spec.log_path.read_text()
    assert spec.api_key not in log and spec.admin_key not in log


async def wait_for_end(processes: list[psutil.Process]) -> None:
    async with asyncio.timeout(60):
        while any(map(is_alive, processes)):
            await asyncio.sleep(0.1)


def engine_processes(log_path: Path) -> list[psutil.Process]:
    """Return the processes that write to this log."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if os.readlink(f"/proc/{process.pid}/fd/1") == str(log_path):
                found.append(process)
        except OSError:
            continue  # it has just ended
    return found
