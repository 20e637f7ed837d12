"""Compare time to first token of SGLang, directly and through Attune: `python -m tests.benchmarks.first_token`."""

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
from tests.benchmarks.http_client import HttpConnection, post
from tests.benchmarks.load import quantile
from tests.benchmarks.overhead import MESSAGES
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
    """Run SGLang on `model`, and wait up to `seconds` for it. `fields` override those of the tests' EngineSpec."""
    with TemporaryDirectory() as folder, start_blocking_portal() as portal:
        spec = replace(engine_spec(Path(folder), model), **fields)
        supervisor = Supervisor(spec, record := InMemoryEngineRecord(), UNCHECKED)
        supervisor_run = portal.start_task_soon(supervisor.run)
        portal.call(wait_for_event, record, "ready 1", seconds)
        try:
            yield RunningEngine(spec)
        finally:
            portal.call(supervisor.stop)
            supervisor_run.result()


def requests(deployed: Deployment, engine: RunningEngine) -> tuple[Request, Request]:
    """Return the same chat as a direct request (no ids or log-probs, as clients of SGLang send it) and for Attune."""
    body: dict[str, Any] = {"messages": MESSAGES, "stream": True, "max_tokens": TOKENS, "temperature": 1.0}
    key = {"authorization": f"Bearer {engine.spec.api_key}"}
    direct = post(engine.spec.url, "/v1/chat/completions", body | {"model": "demo"}, key)
    via_attune = post(deployed.url, "/v1/chat/completions", body | {"model": POLICY}, deployed.headers)
    return (engine.spec.url, direct), (deployed.url, via_attune)


async def first_token_ms(connection: HttpConnection, request: bytes) -> float:
    start = time.perf_counter()
    response = await connection.request(request)
    assert response.status == 200, response.body[:300]
    return 1000 * (response.first_at - start)


async def send_concurrently(target: Request, num_connections: int, replies: int) -> list[float]:
    url, request = target
    connections = [await HttpConnection.connect(url) for _ in range(num_connections)]

    async def send_all(connection: HttpConnection) -> list[float]:
        return [await first_token_ms(connection, request) for _ in range(replies)]

    latencies = await asyncio.gather(*(send_all(connection) for connection in connections))
    for connection in connections:
        connection.close()
    return [value for values in latencies for value in values]


async def compare(deployed: Deployment, engine: RunningEngine, connections: int, args: argparse.Namespace) -> str:
    both_requests = requests(deployed, engine)
    latencies: tuple[list[list[float]], list[list[float]]] = ([], [])
    for request in both_requests:
        await send_concurrently(request, connections, 3)
    for number in range(args.rounds):
        for side in (0, 1) if number % 2 else (1, 0):
            latencies[side].append(await send_concurrently(both_requests[side], connections, args.each))
    cells = []
    for share in (0.5, 0.99):
        direct, via_attune = ([quantile(values, share) for values in side] for side in latencies)
        added = median(b - a for a, b in zip(direct, via_attune, strict=True))
        cells += [f"{median(direct):.1f}", f"{median(via_attune):.1f}", f"**{added:.1f}**"]
    return " | ".join(cells)


async def run(args: argparse.Namespace) -> None:
    with sglang(args.model) as engine:
        info = httpx2.get(f"{engine.spec.url}/server_info", headers={"authorization": f"Bearer {engine.spec.api_key}"})
        print(f"{machine()}; SGLang {info.json().get('version', '?')}, {engine.spec.device}, {args.model.name}")
        print(f"{args.rounds} rounds of {args.each} replies per connection each, alternating; ms to the first token\n")
        print("| database | connections | p50 SGLang | p50 Attune | p50 added | p99 SGLang | p99 Attune | p99 added |")
        print("|---|---|---|---|---|---|---|---|")
        for kind in args.databases:
            keys = {"engine__api_key": engine.spec.api_key, "engine__admin_key": engine.spec.admin_key}
            async with deployment(kind, engine.spec.url, **keys) as deployed:
                for connections in args.connections:
                    print(
                        f"| {kind} | {connections} | {await compare(deployed, engine, connections, args)} |", flush=True
                    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--each", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--databases", nargs="+", choices=DATABASES, default=list(DATABASES))
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
