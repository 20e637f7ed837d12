"""A planned run under kills: processes play its attempts while every process, theirs too, is killed at random.

Each attempt must have one episode that is learned from, whatever has died, and each recorded token the log-prob that
the engine gives it under the version that the reply names.
"""

import asyncio
import json
import os
import random
import sys
from asyncio.subprocess import DEVNULL, Process
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx2

from app.core.settings import REPOSITORY, Settings
from tests.faults.suite.deployment import Deployment, make_settings
from tests.faults.suite.fork_server_client import ForkServerClient
from tests.faults.suite.kills import FaultRun, run_faults
from tests.faults.suite.load import Load
from tests.faults.suite.planned_run_checks import RunReport, check_run
from tests.faults.suite.progress import ProgressMonitor
from tests.faults.suite.services import Services

RUN = "faults"
ROOMS = "tests.support.environments:Rooms"  # three steps an attempt, and the outcome 0.5
GROUP_SIZE = 4
NUM_PLAYERS, CONCURRENCY = 2, 8  # processes, and attempts of each at a time
KILLED = ("api", "worker", "publisher", "trainer", "beat", "engine")
MAX_KILL_SECONDS = 8.0  # between two kills of players, which take seconds to start
LEASE_SECONDS = 5.0  # a process of a loaded machine renews its leases four times in that
PAUSE_SECONDS = 0.5  # before a process that has ended is started again, and between two looks at the run
STALL_SECONDS = 300.0  # without an attempt that ends


class Planned(NamedTuple):
    """What is planned: `num_kills` of each kind of process."""

    num_tasks: int
    num_kills: int

    @property
    def num_attempts(self) -> int:
        return GROUP_SIZE * self.num_tasks


@dataclass
class Players:
    """The processes that play the run. They are started again until it is complete, and killed meanwhile."""

    deployment: Deployment
    planned: Planned
    rng: random.Random
    processes: dict[int, Process] = field(default_factory=dict)
    num_kills: int = 0
    num_under_way: int = 0  # attempts
    is_complete: bool = False

    async def play(self, monitor: ProgressMonitor, load: Load) -> None:
        """Return when the run is complete. Raises TimeoutError if it does not go on."""
        async with asyncio.TaskGroup() as group:
            killing = group.create_task(self._kill())
            watching = group.create_task(self._watch())
            await asyncio.gather(*(group.create_task(self._keep_playing(number)) for number in range(NUM_PLAYERS)))
            await watching
            killing.cancel()

    async def _keep_playing(self, number: int) -> None:
        settings, key = self.deployment.settings, self.deployment.key
        words = [sys.executable, "-m", "app.cli.main", "environments", "run", ROOMS, "--run", RUN, "--json"]
        words += ["--tasks", str(self.planned.num_tasks), "--group", str(GROUP_SIZE)]
        words += ["--concurrency", str(CONCURRENCY)]
        own = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "ATTUNE_URL": settings.local_url}
        own |= {"ATTUNE_API_KEY": key, "ATTUNE_POLICY": settings.policy}
        with (self.deployment.logs / f"player-{number}.log").open("ab") as log:
            while not self.is_complete:
                process = await asyncio.create_subprocess_exec(
                    *words, cwd=REPOSITORY, env=os.environ | own, stdout=DEVNULL, stderr=log
                )
                self.processes[number] = process
                try:
                    await process.wait()
                finally:
                    if process.returncode is None:
                        process.kill()
                    del self.processes[number]
                await asyncio.sleep(PAUSE_SECONDS)

    async def _kill(self) -> None:
        while self.num_kills < self.planned.num_kills:
            await asyncio.sleep(self.rng.uniform(0, MAX_KILL_SECONDS))
            if self.processes and self.num_under_way > 0:
                self.processes[self.rng.choice(sorted(self.processes))].kill()
                self.num_kills += 1

    async def _watch(self) -> None:
        settings, key = self.deployment.settings, self.deployment.key
        headers = {"authorization": f"Bearer {key}"}
        last: dict[str, int] = {}
        waited = 0.0
        async with httpx2.AsyncClient(base_url=settings.local_url, headers=headers, timeout=5, trust_env=False) as api:
            while not self.is_complete:
                await asyncio.sleep(PAUSE_SECONDS)
                waited += PAUSE_SECONDS
                with suppress(httpx2.HTTPError, ValueError, KeyError):  # the API has just been killed
                    run = (await api.get(f"/v1/environments/runs/{RUN}")).json()
                    if run["attempts"] != last:
                        last, waited = run["attempts"], 0.0
                    self.num_under_way, self.is_complete = last["under_way"], run["is_complete"]
                if waited > STALL_SECONDS:
                    raise TimeoutError(f"the run does not go on: {json.dumps(last)}")


async def play_under_kills(
    folder: Path, where: str, seed: int, planned: Planned, fork_server: ForkServerClient | None = None
) -> dict[str, Any]:
    """Play a planned run on the embedded database and broker, or on PostgreSQL and Redis. Returns the suite's row."""
    with ExitStack() as stack:
        urls: dict[str, Any] = stack.enter_context(Services()).urls() if where == "services" else {}
        settings = make_settings(folder / "home", lease_seconds=LEASE_SECONDS, **urls)
        async with Deployment(settings, fork_server=fork_server) as deployment:
            players = Players(deployment, planned, random.Random(f"{seed}/players"))
            kills = dict.fromkeys(KILLED, planned.num_kills)
            result = await run_faults(deployment, seed, kills, meanwhile=players.play)
            report = await check_run(settings, RUN, planned.num_attempts)
    return _make_row(where, settings, planned, players, result, report)


def _make_row(
    where: str, settings: Settings, planned: Planned, players: Players, result: FaultRun, report: RunReport
) -> dict[str, Any]:
    assert result.report is not None
    counts = {
        **report.counts,
        "kills of each process": planned.num_kills,
        "kills of players": players.num_kills,
        "stalled": len(result.stalled),
        **result.report.table(),
        "seconds": round(result.seconds),
    }
    case = f"{planned.num_attempts:,} attempts, {where}"
    return {"part": "episodes", "case": case, "counts": counts, "errors": result.errors + report.errors}
