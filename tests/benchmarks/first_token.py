"""Time to the first token, bare SGLang against Attune before it: `python -m tests.benchmarks.first_token`."""

import argparse
import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import httpx2
import uvloop
from anyio.from_thread import start_blocking_portal

from tests.benchmarks.deployment import DATABASES, POLICY, Deployment, deployment, machine
from tests.benchmarks.load import quantile
from tests.benchmarks.overhead import MESSAGES
from tests.benchmarks.wire import Wire, post
from tests.support.engine_fixture import (
    DEMO_MODEL,
    START_SECONDS,
    UNCHECKED,
    InMemoryEngineRecord,
    RunningEngine,
    engine_spec,
    wait_for_event,
)
from workers.engine.supervisor import Supervisor

TOKENS = 16
Request = tuple[str, bytes]


@contextmanager
def sglang(model: Path, seconds: float = START_SECONDS, **fields: Any) -> Iterator[RunningEngine]:
    """`seconds`: to wait for it. `fields`: of its EngineSpec, where they differ from the tests'."""
    with TemporaryDirectory() as folder, start_blocking_portal() as portal:
        spec = replace(engine_spec(Path(folder), model), **fields)
        supervisor = Supervisor(spec, ledger := InMemoryEngineRecord(), UNCHECKED)
        running = portal.start_task_soon(supervisor.run)
        portal.call(wait_for_event, ledger, "ready 1", seconds)
        try:
            yield RunningEngine(spec)
        finally:
            portal.call(supervisor.stop)
            running.result()


def requests(there: Deployment, engine: RunningEngine) -> tuple[Request, Request]:
    """The same chat, bare (as a client of SGLang would ask it, without ids or log-probs) and through Attune."""
    body: dict[str, Any] = {"messages": MESSAGES, "stream": True, "max_tokens": TOKENS, "temperature": 1.0}
    key = {"authorization": f"Bearer {engine.spec.api_key}"}
    bare = post(engine.spec.url, "/v1/chat/completions", body | {"model": "demo"}, key)
    through = post(there.url, "/v1/chat/completions", body | {"model": POLICY}, there.headers)
    return (engine.spec.url, bare), (there.url, through)


async def first(wire: Wire, request: bytes) -> float:
    begun = time.perf_counter()
    response = await wire.ask(request)
    assert response.status == 200, response.body[:300]
    return 1000 * (response.first_at - begun)


async def burst(asked: Request, connections: int, each: int) -> list[float]:
    url, request = asked
    wires = [await Wire.to(url) for _ in range(connections)]

    async def one(wire: Wire) -> list[float]:
        return [await first(wire, request) for _ in range(each)]

    took = await asyncio.gather(*(one(wire) for wire in wires))
    for wire in wires:
        wire.close()
    return [value for values in took for value in values]


async def compare(there: Deployment, engine: RunningEngine, connections: int, given: argparse.Namespace) -> str:
    pair = requests(there, engine)
    taken: tuple[list[list[float]], list[list[float]]] = ([], [])
    for asked in pair:
        await burst(asked, connections, 3)
    for number in range(given.rounds):
        for side in (0, 1) if number % 2 else (1, 0):
            taken[side].append(await burst(pair[side], connections, given.each))
    cells = []
    for share in (0.5, 0.99):
        bare, through = ([quantile(values, share) for values in side] for side in taken)
        added = median(b - a for a, b in zip(bare, through, strict=True))
        cells += [f"{median(bare):.1f}", f"{median(through):.1f}", f"**{added:.1f}**"]
    return " | ".join(cells)


async def run(given: argparse.Namespace) -> None:
    with sglang(given.model) as engine:
        told = httpx2.get(f"{engine.spec.url}/server_info", headers={"authorization": f"Bearer {engine.spec.api_key}"})
        print(f"{machine()}; SGLang {told.json().get('version', '?')}, {engine.spec.device}, {given.model.name}")
        print(f"{given.rounds} rounds of {given.each} replies a connection each way, in turns; ms to the first words\n")
        print("| database | connections | p50 bare | p50 Attune | p50 added | p99 bare | p99 Attune | p99 added |")
        print("|---|---|---|---|---|---|---|---|")
        for kind in given.databases:
            keys = {"engine_api_key": engine.spec.api_key, "engine_admin_key": engine.spec.admin_key}
            async with deployment(kind, engine.spec.url, **keys) as there:
                for connections in given.connections:
                    print(
                        f"| {kind} | {connections} | {await compare(there, engine, connections, given)} |", flush=True
                    )


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--model", type=Path, default=DEMO_MODEL)
    given.add_argument("--connections", type=int, nargs="+", default=[1, 4])
    given.add_argument("--each", type=int, default=20)
    given.add_argument("--rounds", type=int, default=5)
    given.add_argument("--databases", nargs="+", choices=DATABASES, default=list(DATABASES))
    uvloop.run(run(given.parse_args()))


if __name__ == "__main__":
    main()
