"""Measure what votes and chats wait beside acts that write for long: `make bench-long-acts`.

A scripted engine and an API process (tests.benchmarks.deployment), a new database for each act. From this process one
vote and one chat at a time are sent, the next one PAUSE_SECONDS after the answer, while the act goes on. Feedback is
curated by a worker process in the act "curate" alone. A line of JSON for each result is appended to `--out`, and
results that are there are not measured again: a run that was ended continues. The times are those of this machine with
all that runs on it: compare them with the row "nothing" of the same run.
"""

import argparse
import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import uvloop

from tests.benchmarks.deployment import DATABASES, deployment, machine, scripted_process
from tests.benchmarks.feedback import VoteRequests, create_turns
from tests.benchmarks.http_client import HttpConnection
from tests.benchmarks.load import quantile
from tests.benchmarks.long_acts_list import Act, Target, list_acts
from tests.benchmarks.overhead import attune_request
from tests.benchmarks.results import append_row, read_rows
from tests.support import many_rows

PAUSE_SECONDS = 0.02  # between an answer and the next request
WARM_UP_SECONDS = 2.0
RATED_TURNS = 100  # that the votes are about
COLUMNS = "database act seconds votes p50 p99 longest chats p50 p99 longest refused load"


@dataclass
class Stream:
    """The requests of one kind, one at a time. `answers` are the start, the milliseconds and the status of each."""

    make: Callable[[], bytes]
    answers: list[tuple[float, float, int]] = field(default_factory=list)

    async def run(self, url: str, is_over: asyncio.Event) -> None:
        connection = await HttpConnection.connect(url)
        while not is_over.is_set():
            started = time.perf_counter()
            response = await connection.request(self.make())
            self.answers.append((started, 1000 * (time.perf_counter() - started), response.status))
            await asyncio.sleep(PAUSE_SECONDS)
        connection.close()

    def summarize(self, name: str, start: float, end: float) -> dict[str, float]:
        """Return the figures of the requests that were under way between the two times."""
        during = [row for row in self.answers if row[0] < end and row[0] + row[1] / 1000 > start]
        times = [row[1] for row in during]
        return {
            f"{name}s": len(times),
            f"{name}_p50": quantile(times, 0.5),
            f"{name}_p99": quantile(times, 0.99),
            f"{name}_longest": max(times, default=float("nan")),
            f"{name}s_refused": sum(row[2] not in (200, 201) for row in during),
        }


async def measure(act: Act, kind: str, engine_url: str) -> dict[str, Any]:
    """Return the figures of the act on a new database."""
    async with (
        deployment(kind, engine_url) as service,
        httpx2.AsyncClient(base_url=service.url, headers=service.headers, timeout=1800, trust_env=False) as api,
    ):
        clean_up = ExitStack()
        target = Target(service, engine_url, api, await create_turns(service, RATED_TURNS), clean_up)
        await act.prepare(target)
        await many_rows.analyze(target.db)
        chat = attune_request(service, stream=False)
        streams = {"vote": Stream(VoteRequests(service, target.turns).single), "chat": Stream(lambda: chat)}
        is_over = asyncio.Event()
        load = asyncio.gather(*(stream.run(service.url, is_over) for stream in streams.values()))
        await asyncio.sleep(WARM_UP_SECONDS)
        start = time.perf_counter()
        found = await act.run(target)
        end = time.perf_counter()
        is_over.set()
        await load
        with clean_up:
            found += "" if act.look is None else await act.look(target)
    row: dict[str, Any] = {"database": kind, "act": act.name, "seconds": end - start, "load": os.getloadavg()[0]}
    for name, stream in streams.items():
        row |= stream.summarize(name, start, end)
    return row | {"found": found}


def format_row(row: Mapping[str, Any]) -> str:
    cells = [row["database"], row["act"], f"{row['seconds']:.1f}"]
    for name in ("vote", "chat"):
        cells += [f"{row[f'{name}s']:,}", *(f"{row[f'{name}_{part}']:.0f}" for part in ("p50", "p99", "longest"))]
    cells += [str(row["votes_refused"] + row["chats_refused"]), f"{row['load']:.1f}"]
    return f"| {' | '.join(cells)} |"


async def run(args: argparse.Namespace) -> None:
    acts = list_acts(args)
    for kind in args.databases:
        for act in acts:
            if any((row["database"], row["act"]) == (kind, act.name) for row in read_rows(args.out)):
                continue
            with scripted_process() as engine:
                row = await measure(act, kind, engine)
            append_row(args.out, row)
            print(json.dumps(row), flush=True)
    names = [act.name for act in acts]
    rows = [row for row in read_rows(args.out) if row["act"] in names and row["database"] in args.databases]
    print(f"\n{machine()}; milliseconds\n")
    print(f"| {COLUMNS.replace(' ', ' | ')} |\n|{'---|' * len(COLUMNS.split())}")
    for row in rows:
        print(format_row(row))
    for row in rows:
        if row["found"]:
            print(f"\n{row['database']}, {row['act']}: {row['found']}", end="")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--databases", nargs="+", choices=DATABASES, default=list(DATABASES))
    parser.add_argument("--acts", nargs="+", default=[], help="only acts whose names begin so")
    parser.add_argument("--seconds", type=float, default=20, help="of the act 'nothing'")
    parser.add_argument("--rows", type=int, default=300_000, help="of the dataset")
    parser.add_argument("--ratings", type=int, default=200)
    parser.add_argument("--length", type=int, default=170, help="turns of a rated conversation")
    parser.add_argument("--versions", type=int, nargs="+", default=[100, 400])
    parser.add_argument("--samples", type=int, default=24, help="that a version has learned from")
    parser.add_argument("--expired", type=int, default=20_000, help="turns")
    parser.add_argument("--backlog", type=int, default=5000, help="votes of another project")
    parser.add_argument("--exported", type=int, default=3000, help="turns")
    parser.add_argument("--out", type=Path, default=Path("long_acts.jsonl"))
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
