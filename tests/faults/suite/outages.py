"""Outages of PostgreSQL and Redis under load: refusing, stalled, half open, or killed and started again."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from app.chat.turn_writer import END_RETRY_SECONDS
from app.core.db_timeouts import CONNECT_SECONDS, GRACE_SECONDS
from tests.faults.suite.deployment import KINDS, Deployment, make_settings
from tests.faults.suite.fork_server_client import ForkServerClient
from tests.faults.suite.kills import FaultRun, run_faults
from tests.faults.suite.load import Load
from tests.faults.suite.progress import ProgressMonitor
from tests.faults.suite.proxy import Proxy
from tests.faults.suite.services import Services

WARMUP_SECONDS = 3.0  # the load before each outage
SPEEDUP = 40.0  # ten minutes are compressed to fifteen seconds
SILENT_SECONDS = 20.0  # longer than any time-out under test
DATABASE_TIMEOUTS = {"request_timeout_seconds": 1.0, "job_timeout_seconds": 4.0}  # the defaults are 5 and 20
# The longest duration of a request: it waits for a connection, connects, and waits for a response. Feedback also waits
# for the request before it.
MAX_REQUEST_SECONDS = (
    2 * (DATABASE_TIMEOUTS["request_timeout_seconds"] + GRACE_SECONDS)
    + CONNECT_SECONDS
    + DATABASE_TIMEOUTS["request_timeout_seconds"]
    + END_RETRY_SECONDS  # the end of a reply is tried again
)
SLACK_SECONDS = 8.0  # the additional time on a loaded machine
RECOVERY_SECONDS = 90.0
Fault = Callable[[Services, Proxy, Proxy, float], Awaitable[None]]


async def database_refuses(services: Services, database: Proxy, broker: Proxy, speedup: float) -> None:
    await database.refuse()
    await asyncio.sleep(5)


async def database_dies(services: Services, database: Proxy, broker: Proxy, speedup: float) -> None:
    await asyncio.to_thread(services.kill_postgres)
    await asyncio.sleep(2)
    await asyncio.to_thread(services.start_postgres)


async def database_restarts(services: Services, database: Proxy, broker: Proxy, speedup: float) -> None:
    await asyncio.to_thread(services.restart_postgres)


async def database_stalls(services: Services, database: Proxy, broker: Proxy, speedup: float) -> None:
    database.stall()
    await asyncio.sleep(SILENT_SECONDS)


async def database_half_open(services: Services, database: Proxy, broker: Proxy, speedup: float) -> None:
    await database.half_open()
    await asyncio.sleep(SILENT_SECONDS)


async def broker_dies(services: Services, database: Proxy, broker: Proxy, speedup: float) -> None:
    await asyncio.to_thread(services.kill_redis)
    await asyncio.sleep(600 / speedup)
    await asyncio.to_thread(services.start_redis)


async def broker_restarts(services: Services, database: Proxy, broker: Proxy, speedup: float) -> None:
    await asyncio.to_thread(services.restart_redis)


async def broker_refuses(services: Services, database: Proxy, broker: Proxy, speedup: float) -> None:
    await broker.refuse()
    await asyncio.sleep(600 / speedup)


async def broker_stalls(services: Services, database: Proxy, broker: Proxy, speedup: float) -> None:
    broker.stall()
    await asyncio.sleep(SILENT_SECONDS)


CASES: dict[str, tuple[str, Fault, int]] = {
    "database refuses": ("database", database_refuses, 3),
    "database restarted": ("database", database_restarts, 5),
    "database killed -9": ("database", database_dies, 5),
    "database stalls": ("database", database_stalls, 2),
    "database half open": ("database", database_half_open, 2),
    "broker restarted": ("broker", broker_restarts, 5),
    "broker killed -9, 10 minutes": ("broker", broker_dies, 2),
    "broker refuses, 10 minutes": ("broker", broker_refuses, 2),
    "broker stalls": ("broker", broker_stalls, 2),
}


async def run_outage(
    folder: Path,
    case: str,
    seed: int,
    times: int | None = None,
    fork_server: ForkServerClient | None = None,
    speedup: float = SPEEDUP,
) -> dict[str, Any]:
    """Run the outage of a case `times` times. Return a row with the responses and the recovery times."""
    service, fault, default_times = CASES[case]
    during: Counter[str] = Counter()
    recovery_seconds: list[float] = []
    longest_seconds: list[float] = []
    stalled: list[str] = []
    with Services() as services:
        async with Proxy(services.postgres_port) as database, Proxy(services.redis_port) as broker:
            urls = services.urls(database.port, broker.port)
            overrides: dict[str, Any] = {**(DATABASE_TIMEOUTS if service == "database" else {}), **urls}
            settings = make_settings(folder / "home", **overrides)
            switches = {kind: {"FAULTS_RETRY_SPEEDUP": str(speedup)} for kind in KINDS}

            async def meanwhile(monitor: ProgressMonitor, load: Load) -> None:
                for _ in range(times or default_times):
                    await asyncio.sleep(WARMUP_SECONDS)
                    before, load.longest_seconds = Counter(load.statuses), 0.0
                    await fault(services, database, broker, speedup)
                    during.update(load.statuses - before)
                    longest_seconds.append(load.longest_seconds)
                    await database.restore()
                    await broker.restore()
                    try:
                        now = time.monotonic()
                        seconds = await monitor.wait_for_progress("worker", now, timeout=RECOVERY_SECONDS)
                    except TimeoutError as error:
                        stalled.append(str(error))
                    else:
                        recovery_seconds.extend([] if seconds is None else [seconds])
                stalled.extend(await check_next_version(monitor))

            async with Deployment(settings, switches, fork_server) as deployment:
                url = services.urls()["database__url"]
                result = await run_faults(deployment, seed, {}, meanwhile=meanwhile, monitor_url=url)
                result.stalled += stalled
    longest = max(longest_seconds)
    return make_row(case, service, times or default_times, during, recovery_seconds, longest, result)


async def check_next_version(monitor: ProgressMonitor) -> list[str]:
    """Return an error unless another version is released within RECOVERY_SECONDS."""
    snapshot = monitor.latest
    until, released = snapshot.at + RECOVERY_SECONDS, snapshot.counts["released_versions"]
    while snapshot.at < until:
        snapshot = await monitor.snapshot_after(snapshot.at)
        if snapshot.counts["released_versions"] > released:
            return []
    return [f"no version in {RECOVERY_SECONDS:.0f} s after the last outage: {snapshot.counts}"]


def make_row(
    case: str,
    service: str,
    times: int,
    during: Counter[str],
    recovery_seconds: list[float],
    longest_seconds: float,
    result: FaultRun,
) -> dict[str, Any]:
    assert result.report is not None
    good = {name: during[name] for name in ("completions 200", "feedback 201", "feedback 200") if during[name]}
    bad = {name: count for name, count in during.items() if name not in good}
    errors = result.errors
    if result.streams["cut"]:
        errors = [*errors, f"streams that ended without [DONE]: {result.streams['cut']}"]
    if service == "broker" and bad:
        errors = [*errors, f"without a broker: {bad}"]
    if longest_seconds > MAX_REQUEST_SECONDS + SLACK_SECONDS:
        errors = [*errors, f"a request took {longest_seconds:.1f} s"]
    counts = {
        "times": times,
        "answered meanwhile": sum(good.values()),
        "refused meanwhile": dict(sorted(bad.items())),
        "longest request s": round(longest_seconds, 2),
        "slowest recovery s": round(max(recovery_seconds), 2) if recovery_seconds else None,
        "streams done": result.streams["done"],
        "with an error event": result.streams["error"],
        "cut": result.streams["cut"],
        "turns left open": result.open_work["open_chats"],
        **result.report.table(),
    }
    return {"part": "services", "case": case, "counts": counts, "errors": errors}
