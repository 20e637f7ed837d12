"""Two ranks on one or two hosts, killed, stopped or idle: the group restarts, and a batch is applied once."""

import asyncio
import json
import signal
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from app.models import Batch, BatchState, Sample, SampleState, Version
from tests.support.deployment import Harness
from tests.support.engine_fixture import free_port
from tests.support.frozen_batches import create_batch
from tests.support.held_updates import UpdateHold
from tests.support.processes import PATIENCE_SECONDS, Processes, processes, until
from workers.training import batch_claims

SAMPLES = 16
RANK_TIMEOUT = 6.0
FAULTS = [(signal.SIGSTOP, 0), (signal.SIGKILL, 1)]  # rank 0 killed: tests/faults/test_killed.py
pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


def rank_processes(running: Processes) -> dict[int, psutil.Process]:
    """Return the processes under torchrun by rank."""
    torchrun = running.children["trainer"].process
    assert torchrun is not None
    ranks = {}
    for process in psutil.Process(torchrun.pid).children():
        try:
            if "workers.trainer" in process.cmdline():
                ranks[int(process.environ()["RANK"])] = process
        except psutil.Error:  # it has just ended
            continue
    return ranks


def add_options(running: Processes, *options: str) -> None:
    running.children["trainer"].command += options


@pytest.mark.slow
async def test_rank_that_dies_or_hangs_costs_one_attempt(harness: Harness, tmp_path: Path) -> None:
    hold = UpdateHold(tmp_path)
    settings = hold.settings(harness.settings).replace(
        {
            "workers.lease_seconds": 6.0,
            "workers.reconcile_seconds": 0.5,
            "workers.max_attempts": len(FAULTS) + 1,
        }
    )

    async def read_batch() -> Batch:
        return (await harness.all(Batch))[0]

    async def is_ready() -> bool:
        log = running.children["trainer"].log
        return log.exists() and "trainer ready: 2 rank(s)" in log.read_text()

    with processes(settings) as running:
        add_options(running, "--nproc", "2", "--rank-timeout", str(RANK_TIMEOUT))
        running.start("trainer")
        await until(is_ready, PATIENCE_SECONDS, "two ranks are ready")
        idle = rank_processes(running)
        await asyncio.sleep(1.5 * RANK_TIMEOUT)
        assert {rank: process.pid for rank, process in rank_processes(running).items()} == {
            rank: process.pid for rank, process in idle.items()
        }, "an idle rank sends heartbeats"
        await create_batch(harness.db, (await harness.policy()).id, count=SAMPLES)
        running.start("worker", "beat")

        for attempt, (number, rank) in enumerate(FAULTS, start=1):
            pids = await hold.wait(num_ranks=2)
            assert (await read_batch()).attempt == attempt
            rank_processes(running)[rank].send_signal(number)
            hold.release(pids)
        hold.open()

        async def is_trained() -> bool:
            return (await read_batch()).state == BatchState.TRAINED

        await until(is_trained, PATIENCE_SECONDS, "the batch is trained after the faults")

    done = await read_batch()
    assert done.attempt == len(FAULTS) + 1
    [version] = [version for version in await harness.all(Version) if version.number > 0]
    state = json.loads((Path(version.adapter_path) / "trainer" / "state.json").read_text())
    assert state["updates"] == 1
    samples = await harness.all(Sample)
    assert len({sample.turn_id for sample in samples}) == len(samples) == SAMPLES
    assert {(sample.state, sample.batch_id) for sample in samples} == {(SampleState.TRAINED, done.id)}


@pytest.mark.slow
async def test_hosts_with_a_rendezvous_endpoint_train_together(harness: Harness) -> None:
    """Two torchrun process trees on this machine represent two hosts."""
    settings = harness.settings.replace({"workers.lease_seconds": 20.0})
    batch_id = await create_batch(harness.db, (await harness.policy()).id)

    async def is_trained() -> bool:
        return bool((await harness.get(Batch, batch_id)).state == BatchState.TRAINED)

    with processes(settings) as running:
        add_options(running, "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--nproc", "1")
        first = running.children["trainer"]
        second = running.children["second"] = replace(first, name="second", log=first.log.with_name("second.log"))
        running.start("trainer", "second")
        await until(is_trained, PATIENCE_SECONDS, "the batch is trained by both")
        logs = first.log.read_text() + second.log.read_text()
    assert logs.count("trainer ready: 2 rank(s)") == 1, "only rank 0 consumes messages"
    [version] = [version for version in await harness.all(Version) if version.number]
    assert version.batch_id == batch_id


async def test_trainer_that_is_told_to_stop_hands_its_batch_back(harness: Harness, tmp_path: Path) -> None:
    """A preemption is no failure of the batch, so it uses up no attempt."""
    batch_id, hold = await create_batch(harness.db, (await harness.policy()).id), UpdateHold(tmp_path)
    with processes(hold.settings(harness.settings)) as running:
        running.start("trainer")
        await hold.wait()
        assert (await harness.get(Batch, batch_id)).attempt == 1
        await asyncio.to_thread(running.children["trainer"].stop)
    batch = await harness.get(Batch, batch_id)
    assert (batch.state, batch.attempt) == (BatchState.OPEN, 0)
    assert await batch_claims.claim(harness.db, "another trainer", harness.settings) is not None, "without a delay"
