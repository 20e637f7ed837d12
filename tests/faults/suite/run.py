"""`make faults`: kills, outages of services, full disks and lost messages, with counts. See docs/faults.md."""

import argparse
import asyncio
import json
import sys
import tempfile
import time
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.faults.suite import engine_kills, kills, tables
from tests.faults.suite.cases import make_cases
from tests.faults.suite.deployment import KINDS, Deployment, make_settings
from tests.faults.suite.services import Services

PARTS = ("kills", "services", "disk", "messages", "episodes", "engines")
WHERE = ("embedded", "services")
# The shortest run that has every part but the real engine: some minutes.
SHORT_RESULTS = Path(".attune/faults-short.jsonl")
SHORT: dict[str, Any] = {
    "kills": 2,
    "together": True,
    "parts": "kills,services,disk,messages",
    "results": SHORT_RESULTS,
}
SHORT_CASES = {
    ("services", "database restarted"),
    ("services", "broker restarted"),
    ("disk", "ENOSPC"),
    ("messages", "lost, embedded"),
}
# The kinds of a group are killed at the same time. While the API is down, there is little work for the others.
GROUPS = (("worker", "judge", "rollout", "publisher", "trainer", "beat"), ("api", "engine"))


class ResultFile:
    """One JSON line for each finished part, so that an interrupted run can continue."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []

    def add(self, **row: Any) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def print_line(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


async def run_kills(results: ResultFile, options: argparse.Namespace, where: str) -> None:
    done = sum_of_kills(results, where)
    rounds = 0
    while remaining := next_group(options, done):
        rounds += 1
        seed = options.seed * 1000 + len(results.read())
        print_line(f"kills, {where}, seed {seed}: {remaining} remain")
        with tempfile.TemporaryDirectory(prefix="attune-faults-", ignore_cleanup_errors=True) as folder:
            result, tracebacks = await one_round(Path(folder), where, seed, remaining, options.seconds)
        results.add(part="kills", where=where, seed=seed, tracebacks=tracebacks, **as_row(result))
        done = sum_of_kills(results, where)
        for error in result.errors:
            print_line(f"ERROR {error}")
        if options.rounds and rounds >= options.rounds:
            return


async def run_others(results: ResultFile, options: argparse.Namespace, parts: list[str]) -> None:
    done = {(row["part"], row.get("name")) for row in results.read()}
    for (part, name), case in make_cases(options.seed, options.episodes).items():
        if part not in parts or (part, name) in done or options.only not in name:
            continue
        if options.short and (part, name) not in SHORT_CASES:
            continue
        print_line(f"{part}: {name}")
        with tempfile.TemporaryDirectory(prefix="attune-faults-", ignore_cleanup_errors=True) as folder:
            try:
                row = await case(Path(folder))
            except Exception as error:
                traceback.print_exc()
                row = {"part": part, "case": name, "counts": {}, "errors": [repr(error)]}
        for message in row["errors"]:
            print_line(f"ERROR {message}")
        results.add(name=name, **row)


async def run_engines(results: ResultFile, options: argparse.Namespace) -> None:
    while (remaining := options.engine_kills - sum_of_engine_kills(results)) > 0:
        seed = options.seed * 1000 + len(results.read())
        print_line(f"engines, seed {seed}: {remaining} kills remain")
        result = await engine_kills.run_engine_kills(seed, remaining, 2 * options.seconds, print_line)
        results.add(seed=seed, **result.row())
        for error in result.errors:
            print_line(f"ERROR {error}")
        if options.rounds:
            return


async def one_round(
    folder: Path, where: str, seed: int, remaining: dict[str, int], seconds: float
) -> tuple[kills.FaultRun, dict[str, int]]:
    with ExitStack() as stack:
        urls = stack.enter_context(Services()).urls() if where == "services" else {}
        settings = make_settings(folder / "home", judged=bool({"judge", "rollout"} & remaining.keys()), **urls)
        # Where beat is killed, the API sends no messages, so that all work depends on the reconciler.
        switches = {"api": {"FAULTS_MESSAGES": "none"}} if "beat" in remaining else {}
        async with Deployment(settings, switches) as deployment:
            result = await kills.run_faults(deployment, seed, remaining, print_line, seconds=seconds)
            return result, count_tracebacks(deployment.logs)


def next_group(options: argparse.Namespace, done: dict[str, int]) -> dict[str, int]:
    """Return the group with the most kills that remain, and how many remain of each kind."""
    remaining = {kind: options.kills - done.get(kind, 0) for kind in options.kinds if done.get(kind, 0) < options.kills}
    groups = (KINDS,) if options.together else GROUPS
    by_group = [{kind: remaining[kind] for kind in group if kind in remaining} for group in groups]
    return max(by_group, key=lambda kinds: max(kinds.values(), default=0))


def count_tracebacks(logs: Path) -> dict[str, int]:
    """Return the number of exceptions in each process's log."""
    return {log.stem: log.read_text(errors="replace").count("Traceback") for log in sorted(logs.glob("*.log"))}


def as_row(result: kills.FaultRun) -> dict[str, Any]:
    return vars(result) | {"report": vars(result.report), "errors": result.errors}


def sum_of_kills(results: ResultFile, where: str) -> dict[str, int]:
    total: dict[str, int] = {}
    for row in results.read():
        if row["part"] == "kills" and row["where"] == where:
            for kind, count in row["kills"].items():
                total[kind] = total.get(kind, 0) + count
    return total


def sum_of_engine_kills(results: ResultFile) -> int:
    return sum(sum(row["kills"].values()) for row in results.read() if row["part"] == "engines")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--where", default=",".join(WHERE), help="embedded, services (Postgres and Redis), or both")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--kills", type=int, default=300, help="of each kind, in each deployment")
    parser.add_argument("--engine-kills", type=int, default=100, help="of the real engine, two replicas together")
    parser.add_argument("--episodes", type=int, default=10_000, help="of each planned run; a kill of each kind for 100")
    parser.add_argument("--seconds", type=float, default=300.0, help="duration of a round of kills")
    parser.add_argument("--rounds", type=int, default=0, help="the maximum number of rounds of kills; 0: no limit")
    parser.add_argument("--together", action="store_true", help="kill all kinds concurrently")
    parser.add_argument("--results", type=Path, default=Path(".attune/faults.jsonl"), help="the file of the results")
    parser.add_argument("--only", default="", help="of the other parts, the cases whose name contains this")
    parser.add_argument(
        "--short", action="store_true", help="two kills of each kind and four cases; results of its own"
    )
    if parser.parse_known_args()[0].short:
        SHORT_RESULTS.unlink(missing_ok=True)  # it does not resume
        parser.set_defaults(**SHORT)
    options = parser.parse_args()
    options.kinds = options.kinds.split(",")
    results, parts, where = ResultFile(options.results), options.parts.split(","), options.where.split(",")
    for place in where:
        if "kills" in parts:
            asyncio.run(run_kills(results, options, place))
    asyncio.run(run_others(results, options, parts))
    if "engines" in parts:
        asyncio.run(run_engines(results, options))
    print(tables.format_tables(results.read()))
    sys.exit(any(row["errors"] for row in results.read()))


if __name__ == "__main__":
    main()
