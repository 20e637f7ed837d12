"""Profile the CPU time of one chat request and one feedback request: `python -m tests.benchmarks.profile`."""

import argparse
import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from statistics import median

import orjson
import uvloop

from tests.benchmarks.deployment import DATABASES, POLICY, Deployment, deployment, machine, scripted_process
from tests.benchmarks.http_client import ConnectionPool, post
from tests.benchmarks.load import closed_loop
from tests.benchmarks.overhead import MESSAGES

MAX_LINES = 14


async def read_cpu_seconds(target: Deployment) -> Counter[tuple[str, str]]:
    """Return seconds of CPU time since the last call, by module and caller."""
    report = target.settings.home / "samples.json"
    report.unlink(missing_ok=True)
    os.kill(target.api_pid, signal.SIGUSR1)
    while not report.exists():
        await asyncio.sleep(0.01)
    return Counter({(where, caller): seconds for where, caller, seconds in orjson.loads(report.read_bytes())})


def sum_by_module(seconds: Counter[tuple[str, str]]) -> Counter[str]:
    by_module: Counter[str] = Counter()
    for (where, _), module_seconds in seconds.items():
        by_module[where] += module_seconds
    return by_module


async def measure(target: Deployment, what: str, make: Callable[[], bytes], arguments: argparse.Namespace) -> None:
    await closed_loop(target.url, make, arguments.connections, 1, (200, 201))
    await read_cpu_seconds(target)
    latencies, errors, _ = await closed_loop(target.url, make, arguments.connections, arguments.seconds, (200, 201))
    seconds = await read_cpu_seconds(target)
    cpu_ms = 1000 * seconds.total() / len(latencies)
    print(
        f"\n### {what}: {cpu_ms:.2f} ms of CPU time, {median(latencies):.2f} ms latency ({len(latencies)} requests, "
        f"{errors} errors)\n"
    )
    print("| package or library | ms | share |\n|---|---|---|")
    for module, part in sum_by_module(seconds).most_common(MAX_LINES):
        print(f"| {module} | {1000 * part / len(latencies):.3f} | {part / seconds.total():.0%} |")
    print("\n| module | called by | ms |\n|---|---|---|")
    for (where, caller), part in seconds.most_common(MAX_LINES):
        print(f"| {where} | {caller} | {1000 * part / len(latencies):.3f} |", flush=True)


def votes(target: Deployment, turn: str) -> Iterator[bytes]:
    for number in count():
        body = {"id": f"vote-{number}", "completion_id": turn, "kind": "binary", "value": True}
        yield post(target.url, "/v1/feedback", body, target.headers)


async def run(arguments: argparse.Namespace) -> None:
    print(machine())
    for kind in arguments.databases:
        with scripted_process() as engine:
            async with deployment(kind, engine, api="tests.benchmarks.sampled_api") as target:
                await measure_database(target, kind, arguments)


async def measure_database(target: Deployment, kind: str, arguments: argparse.Namespace) -> None:
    body = {"model": POLICY, "messages": MESSAGES}
    unary = post(target.url, "/v1/chat/completions", body, target.headers)
    stream = post(target.url, "/v1/chat/completions", body | {"stream": True}, target.headers)
    async with ConnectionPool(target.url) as pool:
        turn = orjson.loads((await pool.request(unary)).body)["id"]
    await measure(target, f"one chat, not streamed, {kind}", lambda: unary, arguments)
    await measure(target, f"one chat, streamed, {kind}", lambda: stream, arguments)
    vote_requests = votes(target, turn)
    await measure(target, f"one feedback, {kind}", lambda: next(vote_requests), arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--databases", nargs="+", choices=DATABASES, default=list(DATABASES))
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
