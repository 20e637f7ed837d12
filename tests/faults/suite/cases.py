"""All cases except the kills, by name: `make faults` runs each once, and stores its result as a row."""

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from tests.faults.suite import messages, outages, planned_runs, shim
from tests.faults.suite.services import Services

Row = dict[str, Any]
Case = Callable[[Path], Awaitable[Row]]
FAULTS = ("ENOSPC", "EIO", "SIGKILL")
HOUR = messages.HOUR


async def run_disk_case(folder: Path, fault: str) -> Row:
    """Run the disk case in a separate process, which must be started with the shim."""
    library = await asyncio.to_thread(shim.build, folder)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.faults.suite.disk", str(folder), fault),
        env={**os.environ, "LD_PRELOAD": library, "OMP_NUM_THREADS": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    if process.returncode != 0:
        raise RuntimeError(err.decode()[-3000:])
    result = json.loads(out.splitlines()[-1])
    counts = result["counts"] | result["calls"][fault]
    return {"part": "disk", "case": f"{fault} at every call", "counts": counts, "errors": result["errors"]}


async def run_on(where: str, case: Callable[..., Awaitable[Row]], folder: Path, *arguments: Any) -> Row:
    """Run a case on the embedded database and broker, or on PostgreSQL and Redis."""
    with ExitStack() as stack:
        urls = stack.enter_context(Services()).urls() if where == "services" else {}
        row = await case(folder, urls, *arguments)
    return row | {"case": f"{row['case']}, {where}"}


def make_cases(seed: int, num_episodes: int) -> dict[tuple[str, str], Case]:
    """Return the cases by part and name. `num_episodes`: of each planned run, of which each process is killed 1 %."""
    cases: dict[tuple[str, str], Case] = {("disk", fault): partial(run_disk_case, fault=fault) for fault in FAULTS}

    def add_message_case(name: str, where: str, case: Callable[..., Awaitable[Row]], *arguments: Any) -> None:
        async def run(folder: Path) -> Row:
            return await run_on(where, case, folder, seed, *arguments)

        cases["messages", f"{name}, {where}"] = run

    for where in ("embedded", "services"):
        add_message_case("lost", where, messages.lose_messages, 20.0)
        add_message_case("tripled", where, messages.triple_messages, 20.0)
        add_message_case("two trainers", where, messages.stop_a_trainer, 10)
    for skew in (
        {"worker": HOUR},
        {"worker": -HOUR},
        {"api": HOUR, "trainer": -HOUR, "publisher": HOUR, "beat": -HOUR},
    ):
        name = " ".join(f"{kind}{seconds // HOUR:+d}" for kind, seconds in skew.items())
        add_message_case(f"clocks {name}", "services", messages.skew_clocks, 15.0, skew)
    planned = planned_runs.Planned(num_episodes // planned_runs.GROUP_SIZE, num_episodes // 100)
    for where in ("embedded", "services"):
        play = partial(planned_runs.play_under_kills, where=where, seed=seed, planned=planned)
        cases["episodes", f"kills, {where}"] = play
    for name in outages.CASES:
        cases["services", name] = partial(outages.run_outage, case=name, seed=seed)
    return cases
