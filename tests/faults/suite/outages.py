"""PostgreSQL and Redis away under load: cut off, refusing, stalled, half open, killed -9 and started again."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from app.core.db_timeouts import CONNECT_SECONDS, GRACE_SECONDS
from tests.faults.suite.deployment import KINDS, Deployment, small
from tests.faults.suite.kills import Storm, storm
from tests.faults.suite.load import Load
from tests.faults.suite.nursery import Nursery
from tests.faults.suite.proxy import Proxy
from tests.faults.suite.services import Services
from tests.faults.suite.watch import Watch

CALM_SECONDS = 3.0  # of load before and after
HASTE = 40.0  # ten minutes are fifteen seconds
SILENT_SECONDS = 20.0  # longer than anybody waits for an answer here, on a busy machine, too
WAITS = {"database_seconds": 1.0, "database_job_seconds": 4.0}  # 5 and 20 in service
# The longest that a request may take: in line for a connection, connecting, a word; and once more behind one like it.
LATEST = 2 * (WAITS["database_seconds"] + GRACE_SECONDS) + CONNECT_SECONDS + WAITS["database_seconds"]
BUSY_SECONDS = 8.0  # that a machine with other things to do may add
BACK_SECONDS = 90.0
Fault = Callable[[Services, Proxy, Proxy, float], Awaitable[None]]


async def database_refuses(services: Services, database: Proxy, broker: Proxy, haste: float) -> None:
    await database.refuse()
    await asyncio.sleep(5)


async def database_dies(services: Services, database: Proxy, broker: Proxy, haste: float) -> None:
    await asyncio.to_thread(services.kill_postgres)
    await asyncio.sleep(2)
    await asyncio.to_thread(services.start_postgres)


async def database_stalls(services: Services, database: Proxy, broker: Proxy, haste: float) -> None:
    database.stall()
    await asyncio.sleep(SILENT_SECONDS)


async def database_half_open(services: Services, database: Proxy, broker: Proxy, haste: float) -> None:
    await database.half_open()
    await asyncio.sleep(SILENT_SECONDS)


async def broker_dies(services: Services, database: Proxy, broker: Proxy, haste: float) -> None:
    await asyncio.to_thread(services.kill_redis)
    await asyncio.sleep(600 / haste)
    await asyncio.to_thread(services.start_redis)


async def broker_refuses(services: Services, database: Proxy, broker: Proxy, haste: float) -> None:
    await broker.refuse()
    await asyncio.sleep(600 / haste)


async def broker_stalls(services: Services, database: Proxy, broker: Proxy, haste: float) -> None:
    broker.stall()
    await asyncio.sleep(SILENT_SECONDS)


CASES: dict[str, tuple[str, Fault, int]] = {
    "database refuses": ("database", database_refuses, 3),
    "database killed -9": ("database", database_dies, 5),
    "database stalls": ("database", database_stalls, 2),
    "database half open": ("database", database_half_open, 2),
    "broker killed -9, 10 minutes": ("broker", broker_dies, 2),
    "broker refuses, 10 minutes": ("broker", broker_refuses, 2),
    "broker stalls": ("broker", broker_stalls, 2),
}


async def outage(
    folder: Path, case: str, seed: int, times: int | None = None, nursery: Nursery | None = None, haste: float = HASTE
) -> dict[str, Any]:
    """One case, so many times: what was answered meanwhile, and how soon work went on."""
    what, fault, usual = CASES[case]
    during: Counter[str] = Counter()
    back: list[float] = []
    latest: list[float] = []
    stalled: list[str] = []
    with Services() as services:
        async with Proxy(services.postgres_port) as database, Proxy(services.redis_port) as broker:
            urls = services.urls(database.port, broker.port)
            settings = small(folder / "home", **(WAITS if what == "database" else {}), **urls)
            switches = {kind: {"FAULTS_HASTE": str(haste)} for kind in KINDS}

            async def meanwhile(watch: Watch, load: Load) -> None:
                for _ in range(times or usual):
                    await asyncio.sleep(CALM_SECONDS)
                    before, load.latest = Counter(load.statuses), 0.0
                    await fault(services, database, broker, haste)
                    during.update(load.statuses - before)
                    latest.append(load.latest)
                    await database.mend()
                    await broker.mend()
                    try:
                        seconds = await watch.progress("worker", time.monotonic(), patience=BACK_SECONDS)
                    except TimeoutError as stuck:
                        stalled.append(str(stuck))
                    else:
                        back.extend([] if seconds is None else [seconds])
                stalled.extend(await learns_on(watch))

            async with Deployment(settings, switches, nursery) as deployment:
                direct = services.urls()["database_url"]
                result = await storm(deployment, seed, {}, meanwhile=meanwhile, look_at=direct)
                result.stalled += stalled
    return row(case, what, times or usual, during, back, max(latest), result)


async def learns_on(watch: Watch) -> list[str]:
    """Nothing if one more version comes home in good time."""
    look = watch.latest
    until, home = look.at + BACK_SECONDS, look.counts["home"]
    while look.at < until:
        look = await watch.after(look.at)
        if look.counts["home"] > home:
            return []
    return [f"no version in {BACK_SECONDS:.0f} s after the last outage: {look.counts}"]


def row(
    case: str, what: str, times: int, during: Counter[str], back: list[float], latest: float, result: Storm
) -> dict[str, Any]:
    assert result.found is not None
    good = {name: during[name] for name in ("completions 200", "feedback 201", "feedback 200") if during[name]}
    bad = {name: count for name, count in during.items() if name not in good}
    wrong = result.wrong
    if what == "broker" and bad:
        wrong = [*wrong, f"without a broker: {bad}"]
    if latest > LATEST + BUSY_SECONDS:
        wrong = [*wrong, f"a request took {latest:.1f} s"]
    counts = {
        "times": times,
        "answered meanwhile": sum(good.values()),
        "refused meanwhile": dict(sorted(bad.items())),
        "longest request s": round(latest, 2),
        "worst s back": round(max(back), 2) if back else None,
        **result.found.table(),
    }
    return {"part": "services", "case": case, "counts": counts, "wrong": wrong}
