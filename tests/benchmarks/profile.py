"""Where the processor's time of one chat and of one feedback goes: `python -m tests.benchmarks.profile`."""

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

SHOWN = 14


async def spent(there: Deployment) -> Counter[tuple[str, str]]:
    """Seconds of processor time since the last call, by place and asker."""
    report = there.settings.home / "samples.json"
    report.unlink(missing_ok=True)
    os.kill(there.api_pid, signal.SIGUSR1)
    while not report.exists():
        await asyncio.sleep(0.01)
    return Counter({(where, asker): seconds for where, asker, seconds in orjson.loads(report.read_bytes())})


def by_place(seconds: Counter[tuple[str, str]]) -> Counter[str]:
    places: Counter[str] = Counter()
    for (where, _), each in seconds.items():
        places[where] += each
    return places


async def measure(there: Deployment, what: str, make: Callable[[], bytes], given: argparse.Namespace) -> None:
    await closed_loop(there.url, make, given.connections, 1, (200, 201))
    await spent(there)
    took, errors, _ = await closed_loop(there.url, make, given.connections, given.seconds, (200, 201))
    seconds = await spent(there)
    each = 1000 * seconds.total() / len(took)
    print(
        f"\n### {what}: {each:.2f} ms of processor time, {median(took):.2f} ms to wait ({len(took)} requests, "
        f"{errors} errors)\n"
    )
    print("| room or library | ms | share |\n|---|---|---|")
    for place, part in by_place(seconds).most_common(SHOWN):
        print(f"| {place} | {1000 * part / len(took):.3f} | {part / seconds.total():.0%} |")
    print("\n| work done in | asked for by | ms |\n|---|---|---|")
    for (where, asker), part in seconds.most_common(SHOWN):
        print(f"| {where} | {asker} | {1000 * part / len(took):.3f} |", flush=True)


def thumbs(there: Deployment, turn: str) -> Iterator[bytes]:
    for number in count():
        body = {"id": f"thumb-{number}", "completion_id": turn, "kind": "binary", "value": True}
        yield post(there.url, "/v1/feedback", body, there.headers)


async def run(given: argparse.Namespace) -> None:
    print(machine())
    for kind in given.databases:
        with scripted_process() as engine:
            async with deployment(kind, engine, api="tests.benchmarks.sampled_api") as there:
                await of_one(there, kind, given)


async def of_one(there: Deployment, kind: str, given: argparse.Namespace) -> None:
    body = {"model": POLICY, "messages": MESSAGES}
    whole = post(there.url, "/v1/chat/completions", body, there.headers)
    stream = post(there.url, "/v1/chat/completions", body | {"stream": True}, there.headers)
    async with Wires(there.url) as wires:
        turn = orjson.loads((await wires.ask(whole)).body)["id"]
    await measure(there, f"one chat, whole, {kind}", lambda: whole, given)
    await measure(there, f"one chat, streamed, {kind}", lambda: stream, given)
    sends = thumbs(there, turn)
    await measure(there, f"one feedback, {kind}", lambda: next(sends), given)


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--seconds", type=float, default=8)
    given.add_argument("--connections", type=int, default=1)
    given.add_argument("--databases", nargs="+", choices=DATABASES, default=list(DATABASES))
    uvloop.run(run(given.parse_args()))


if __name__ == "__main__":
    main()
