"""The supervisor's own conduct, with a stand-in for SGLang that starts in half a second."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from sqlalchemy.exc import OperationalError

from tests.support.engine_fixture import REPOSITORY, ListLedger, engine_spec, wait_until_told
from tests.workers.engine.lone_supervisor import lone_supervisor
from workers.engine.supervisor import Patience, Supervisor
from workers.engine.version_files import AdapterRef, in_place

QUICK = Patience(  # but not with an engine that is slow, as everything is on a busy machine
    beat=0.05,
    silence=60.0,
    probe_every=0.2,
    probe=60.0,
    progress=0.1,
    ledger=0.05,
    first_restart=0.05,
    longest_restart=0.4,
)
HASTY = replace(QUICK, silence=1.5, probe=1.0)
SECONDS = 60.0
Running = Callable[..., AbstractAsyncContextManager[Supervisor]]


@pytest.fixture
def ledger() -> ListLedger:
    return ListLedger()


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def spec(tmp_path, monkeypatch):
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.workers.engine.fake_server "$@"\n')
    interpreter.chmod(0o755)
    monkeypatch.setenv("STAND_IN", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    return replace(engine_spec(tmp_path, tmp_path), python=interpreter)


@pytest.fixture
def supervising(spec, ledger, told) -> Running:
    @asynccontextmanager
    async def run(check=lambda path, sha256: None, patience=QUICK) -> AsyncIterator[Supervisor]:
        supervisor = Supervisor(spec, ledger, in_place(check), tell=told.append, patience=patience)
        running = asyncio.create_task(supervisor.run())
        yield supervisor
        supervisor.stop()
        await asyncio.wait_for(running, SECONDS)

    return run


def ref(name: str) -> AdapterRef:
    return AdapterRef(name, Path("/versions") / name, "0" * 64)


async def until(so: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not so():
            await asyncio.sleep(0.02)


def ready(ledger) -> bool:
    return bool(ledger.diary) and ledger.diary[-1].startswith("ready")


def answers(spec) -> bool:
    with socket.socket() as door:
        return door.connect_ex((spec.host, spec.port)) == 0


async def test_wanted_adapters_are_held_before_it_is_ready(supervising, ledger, tmp_path) -> None:
    ledger.adapters = [ref("shop-v1"), ref("shop-v2")]
    async with supervising():
        await wait_until_told(ledger, "ready 1", SECONDS)
    assert ledger.loaded == ["shop-v1", "shop-v2"]
    assert (tmp_path / "loads").read_text().split() == ["shop-v1", "shop-v2"]


async def test_an_adapter_wanted_meanwhile_is_loaded_before_it_is_ready(supervising, ledger) -> None:
    asked = 0

    async def wanted() -> list[AdapterRef]:
        nonlocal asked
        asked += 1
        before = list(ledger.adapters)
        ledger.adapters = [ref("shop-v1"), ref("shop-v2")]
        return before

    ledger.wanted = wanted
    async with supervising():
        await wait_until_told(ledger, "ready 1", SECONDS)
    assert asked == 2 and ledger.loaded == ["shop-v1", "shop-v2"]


async def test_a_damaged_adapter_never_reaches_the_engine(supervising, ledger, told, tmp_path) -> None:
    ledger.adapters = [ref("shop-v1"), ref("shop-v2")]

    def check(path: Path, sha256: str) -> None:
        if path.name == "shop-v1":
            raise ValueError("adapter_model.safetensors was changed")

    async with supervising(check):
        await until(lambda: "shop-v1 is not loaded: adapter_model.safetensors was changed" in told)
        assert "ready 1" not in ledger.diary  # it was wanted, and it is not there
        ledger.adapters = [ref("shop-v2")]
        await wait_until_told(ledger, "ready 1", SECONDS)
    assert (tmp_path / "loads").read_text().split() == ["shop-v2"]


async def test_an_engine_that_dies_is_started_again_with_all_it_held(supervising, ledger, spec, tmp_path) -> None:
    ledger.adapters = [ref("shop-v1")]
    async with supervising():
        await wait_until_told(ledger, "ready 1", SECONDS)
        os.kill(engine_pid(spec), signal.SIGKILL)
        await wait_until_told(ledger, "ready 2", SECONDS)
    assert ledger.diary[2].startswith("down 1: the engine was killed by signal 9")
    assert ledger.diary[-1] == "down 2: stopped"
    assert (tmp_path / "loads").read_text().split() == ["shop-v1", "shop-v1"]


async def test_a_process_of_its_own_that_is_gone_is_an_end(supervising, ledger, spec) -> None:
    async with supervising():
        for incarnation in (1, 2):
            await wait_until_told(ledger, f"ready {incarnation}", SECONDS)
            [scheduler] = psutil.Process(engine_pid(spec)).children()
            await asyncio.sleep(2.0)  # children of its name came and went
            assert ledger.diary[-1].startswith(f"ready {incarnation}")
            scheduler.kill()
        await wait_until_told(ledger, "ready 3", SECONDS)
    ends = [entry for entry in ledger.diary if entry.startswith("down")]
    assert ends[:2] == [f"down {number}: the engine lost its process sglang::scheduler" for number in (1, 2)]


@pytest.mark.parametrize("settled", [0.0, 600.0])
async def test_only_short_lives_make_it_wait(supervising, ledger, spec, settled, monkeypatch) -> None:
    patience = replace(QUICK, longest_restart=60.0, settled=settled)
    pauses: list[float] = []
    pause = Supervisor._pause

    async def noted(supervisor: Supervisor, seconds: float) -> None:
        pauses.append(seconds)
        await pause(supervisor, seconds)

    monkeypatch.setattr(Supervisor, "_pause", noted)
    async with supervising(patience=patience):
        while len(pauses) < 8 or (settled and max(pauses) == patience.first_restart):
            await wait_until_told(ledger, f"ready {len(pauses) + 1}", SECONDS)
            await asyncio.sleep(2 * patience.beat)
            seen = len(pauses)
            os.kill(engine_pid(spec), signal.SIGKILL)
            await until(lambda seen=seen: len(pauses) > seen)
    # Pauses double, and count from the last start: in the end they are longer than a start takes.
    assert settled or set(pauses[:8]) == {patience.first_restart}


async def test_a_silent_front_is_a_hang(supervising, ledger, tmp_path) -> None:
    async with supervising(patience=HASTY):
        await until(lambda: ready(ledger))
        seen = len(ledger.diary)
        (tmp_path / "mute").touch()
        await until(lambda: len(ledger.diary) > seen)
        (tmp_path / "mute").unlink()
        await until(lambda: ready(ledger))
    assert "silent" in ledger.diary[seen] or "no token" in ledger.diary[seen]


async def test_a_front_that_answers_for_a_stuck_scheduler_is_a_hang(supervising, ledger, tmp_path) -> None:
    patience = replace(QUICK, probe=1.0)
    async with supervising(patience=patience):
        await until(lambda: ready(ledger))
        seen = len(ledger.diary)
        (tmp_path / "stuck").touch()
        await until(lambda: len(ledger.diary) > seen)
        (tmp_path / "stuck").unlink()
        await until(lambda: ready(ledger))
    assert "no token came within 1 s" in ledger.diary[seen]


async def test_an_engine_that_cannot_start_is_tried_again_ever_more_rarely(supervising, ledger, tmp_path) -> None:
    (tmp_path / "exit").touch()
    async with supervising():
        await until(lambda: ledger.incarnation >= 3)
        (tmp_path / "exit").unlink()
        await until(lambda: ledger.diary[-1].startswith("ready"))
    assert ledger.diary[1] == "down 1: the engine exited with code 1; its last words: there is no such model"


async def test_a_taken_port_is_named_at_once(supervising, ledger, spec) -> None:
    with socket.create_server((spec.host, spec.port)):
        async with supervising():
            await until(lambda: ledger.incarnation >= 2)
    assert f"cannot listen on {spec.host}:{spec.port}" in ledger.diary[1]


async def test_a_stop_during_the_start_leaves_nothing(supervising, ledger, spec, told, tmp_path) -> None:
    (tmp_path / "mute").touch()
    async with supervising():
        await until(lambda: any("engine starting" in line for line in told))
    assert ledger.diary == ["starting 1", "down 1: stopped"] and not answers(spec)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_cleanly(spec, tmp_path, number) -> None:
    with lone_supervisor(tmp_path, tmp_path, spec.python) as (process, port, lines):
        assert any("engine ready" in line for line in lines)
        process.send_signal(number)
        assert "engine down: stopped\n" in lines
    assert process.returncode == 0
    with socket.socket() as door:
        assert door.connect_ex(("127.0.0.1", port)) != 0


async def test_a_ledger_that_is_away_does_not_stop_the_engine(supervising, ledger, told) -> None:
    async with supervising():
        await wait_until_told(ledger, "ready 1", SECONDS)

        async def away(incarnation: int) -> None:
            raise OperationalError("UPDATE engines", {}, OSError("the database is away"))

        beat, ledger.beat = ledger.beat, away
        await until(lambda: any("the database is away" in line for line in told))
        ledger.beat = beat
        beats = ledger.beats
        await until(lambda: ledger.beats > beats)
    assert ledger.incarnation == 1


async def test_the_keys_are_not_among_its_flags_and_its_log_is_its_owners_alone(supervising, ledger, spec) -> None:
    async with supervising():
        await wait_until_told(ledger, "ready 1", SECONDS)
        flags = Path(f"/proc/{engine_pid(spec)}/cmdline").read_bytes().decode()
    assert spec.api_key not in flags and spec.admin_key not in flags
    assert spec.api_key not in repr(spec) and spec.admin_key not in repr(spec)
    assert spec.log_path.stat().st_mode & 0o077 == 0


def engine_pid(spec) -> int:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            flags = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # it ended meanwhile
        if f"--port={spec.port}".encode() in flags:
            return int(folder.name)
    raise AssertionError(f"no process listens on port {spec.port}")
