"""Every case beside the kills, by name: what `make faults` runs once each, and keeps a row of."""

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from tests.faults.suite import messages, outages, shim
from tests.faults.suite.services import Services

Row = dict[str, Any]
Case = Callable[[Path], Awaitable[Row]]
FAULTS = ("ENOSPC", "EIO", "SIGKILL")
HOUR = messages.HOUR


async def disk(folder: Path, fault: str) -> Row:
    """Every N, in a process of its own: the shim must stand before libc from the start."""
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
    told = json.loads(out.splitlines()[-1])
    counts = told["counts"] | told["calls"][fault]
    return {"part": "disk", "case": f"{fault} at every call", "counts": counts, "wrong": told["wrong"]}


async def on(where: str, work: Callable[..., Awaitable[Row]], folder: Path, *given: Any) -> Row:
    with ExitStack() as stack:
        urls = stack.enter_context(Services()).urls() if where == "services" else {}
        told = await work(folder, urls, *given)
    return told | {"case": f"{told['case']}, {where}"}


def cases(seed: int) -> dict[tuple[str, str], Case]:
    """By part and name."""
    found: dict[tuple[str, str], Case] = {("disk", fault): partial(disk, fault=fault) for fault in FAULTS}

    def message(name: str, where: str, work: Callable[..., Awaitable[Row]], *given: Any) -> None:
        async def case(folder: Path) -> Row:
            return await on(where, work, folder, seed, *given)

        found["messages", f"{name}, {where}"] = case

    for where in ("embedded", "services"):
        message("lost", where, messages.lost, 20.0)
        message("tripled", where, messages.tripled, 20.0)
        message("two trainers", where, messages.two_trainers, 10)
    for skew in (
        {"worker": HOUR},
        {"worker": -HOUR},
        {"api": HOUR, "trainer": -HOUR, "publisher": HOUR, "beat": -HOUR},
    ):
        name = " ".join(f"{kind}{by // HOUR:+d}" for kind, by in skew.items())
        message(f"clocks {name}", "services", messages.clocks, 15.0, skew)
    for name in outages.CASES:
        found["services", name] = partial(outages.outage, case=name, seed=seed)
    return found
