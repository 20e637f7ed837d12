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
from tests.benchmarks.load import closed_loop
from tests.benchmarks.overhead import MESSAGES
from tests.benchmarks.wire import Wires, post

MAX_LINES = 14


async def read_cpu_seconds(there: Deployment) -> Counter[tuple[str, str]]:
    """Return seconds of CPU time since the last call, by module and caller."""
    report = there.settings.home / "samples.json"
    report.unlink(missing_ok=True)
    os.kill(there.api_pid, signal.SIGUSR1)
    while not report.exists():
        await asyncio.sleep(0.01)
    return Counter({(where, caller): seconds for where, caller, seconds in orjson.loads(report.read_bytes())})


def by_place(seconds: Counter[tuple[str, str]]) -> Counter[str]:
    places: Counter[str] = Counter()
    for (where, _), each in seconds.items():
        places[where] += each
    return places


async def measure(there: Deployment, what: str, make: Callable[[], bytes], arguments: argparse.Namespace) -> None:
    await closed_loop(there.url, make, arguments.connections, 1, (200, 201))
    await read_cpu_seconds(there)
    latencies, errors, _ = await closed_loop(there.url, make, arguments.connections, arguments.seconds, (200, 201))
    seconds = await read_cpu_seconds(there)
    each = 1000 * seconds.total() / len(latencies)
    print(
        f"\n### {what}: {each:.2f} ms of CPU time, {median(latencies):.2f} ms latency ({len(latencies)} requests, "
        f"{errors} errors)\n"
    )
    print("| package or library | ms | share |\n|---|---|---|")
    for place, part in by_place(seconds).most_common(MAX_LINES):
        print(f"| {place} | {1000 * part / len(latencies):.3f} | {part / seconds.total():.0%} |")
    print("\n| module | called by | ms |\n|---|---|---|")
    for (where, caller), part in seconds.most_common(MAX_LINES):
        print(f"| {where} | {caller} | {1000 * part / len(latencies):.3f} |", flush=True)


def thumbs(there: Deployment, turn: str) -> Iterator[bytes]:
    for number in count():
        body = {"id": f"thumb-{number}", "completion_id": turn, "kind": "binary", "value": True}
        yield post(there.url, "/v1/feedback", body, there.headers)


async def run(arguments: argparse.Namespace) -> None:
    print(machine())
    for kind in arguments.databases:
        with scripted_process() as engine:
            async with deployment(kind, engine, api="tests.benchmarks.sampled_api") as there:
                await measure_database(there, kind, arguments)


async def measure_database(there: Deployment, kind: str, arguments: argparse.Namespace) -> None:
    body = {"model": POLICY, "messages": MESSAGES}
    whole = post(there.url, "/v1/chat/completions", body, there.headers)
    stream = post(there.url, "/v1/chat/completions", body | {"stream": True}, there.headers)
    async with Wires(there.url) as wires:
        turn = orjson.loads((await wires.ask(whole)).body)["id"]
    await measure(there, f"one chat, whole, {kind}", lambda: whole, arguments)
    await measure(there, f"one chat, streamed, {kind}", lambda: stream, arguments)
    sends = thumbs(there, turn)
    await measure(there, f"one feedback, {kind}", lambda: next(sends), arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--databases", nargs="+", choices=DATABASES, default=list(DATABASES))
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
