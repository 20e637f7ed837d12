"""`make faults`: kills, services away, disks full and messages lost, with counts. See docs/faults.md."""

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

from tests.faults.suite import engines, kills, tables
from tests.faults.suite.deployment import KINDS, Deployment, small
from tests.faults.suite.parts import cases
from tests.faults.suite.services import Services

PARTS = ("kills", "services", "disk", "messages", "engines")
WHERE = ("embedded", "services")
# Killed at the same time. While the front is killed there is little to do for those behind it.
GROUPS = (("worker", "judge", "rollout", "publisher", "trainer", "beat"), ("api", "engine"))


class Book:
    """One JSON line for each part that was finished: a run that was cut off is taken up where it stopped."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []

    def add(self, **row: Any) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def say(words: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {words}", flush=True)


async def run_kills(book: Book, asked: argparse.Namespace, where: str) -> None:
    done = sum_of_kills(book, where)
    rounds = 0
    while todo := next_group(asked, done):
        rounds += 1
        seed = asked.seed * 1000 + len(book.read())
        say(f"kills, {where}, seed {seed}: {todo} to go")
        with tempfile.TemporaryDirectory(prefix="attune-faults-", ignore_cleanup_errors=True) as folder:
            result, logs = await one_round(Path(folder), where, seed, todo, asked.seconds)
        book.add(part="kills", where=where, seed=seed, logs=logs, **as_row(result))
        done = sum_of_kills(book, where)
        for wrong in result.wrong:
            say(f"WRONG {wrong}")
        if asked.rounds and rounds >= asked.rounds:
            return


async def run_others(book: Book, asked: argparse.Namespace, parts: list[str]) -> None:
    done = {(row["part"], row.get("name")) for row in book.read()}
    for (part, name), case in cases(asked.seed).items():
        if part not in parts or (part, name) in done or asked.only not in name:
            continue
        say(f"{part}: {name}")
        with tempfile.TemporaryDirectory(prefix="attune-faults-", ignore_cleanup_errors=True) as folder:
            try:
                row = await case(Path(folder))
            except Exception as error:
                traceback.print_exc()
                row = {"part": part, "case": name, "counts": {}, "wrong": [repr(error)]}
        for wrong in row["wrong"]:
            say(f"WRONG {wrong}")
        book.add(name=name, **row)


async def run_engines(book: Book, asked: argparse.Namespace) -> None:
    while (todo := asked.engine_kills - sum_of_engine_kills(book)) > 0:
        seed = asked.seed * 1000 + len(book.read())
        say(f"engines, seed {seed}: {todo} kills to go")
        result = await engines.storm(seed, todo, 2 * asked.seconds, say)
        book.add(seed=seed, **result.row())
        for wrong in result.wrong:
            say(f"WRONG {wrong}")
        if asked.rounds:
            return


async def one_round(
    folder: Path, where: str, seed: int, todo: dict[str, int], seconds: float
) -> tuple[kills.Storm, dict[str, int]]:
    with ExitStack() as stack:
        urls = stack.enter_context(Services()).urls() if where == "services" else {}
        settings = small(folder / "home", judged=bool({"judge", "rollout"} & todo.keys()), **urls)
        # Where beat is killed, feedback's own nudges are lost: so it is the sweep that everything depends on.
        switches = {"api": {"FAULTS_RINGS": "none"}} if "beat" in todo else {}
        async with Deployment(settings, switches) as deployment:
            result = await kills.storm(deployment, seed, todo, say, seconds=seconds)
            return result, trouble(deployment.logs)


def next_group(asked: argparse.Namespace, done: dict[str, int]) -> dict[str, int]:
    """The group that has been killed least, and how often each of it is still to be."""
    to_do = {kind: asked.kills - done.get(kind, 0) for kind in asked.kinds if done.get(kind, 0) < asked.kills}
    groups = (KINDS,) if asked.together else GROUPS
    left = [{kind: to_do[kind] for kind in group if kind in to_do} for group in groups]
    return max(left, key=lambda kinds: max(kinds.values(), default=0))


def trouble(logs: Path) -> dict[str, int]:
    """How often each process told of an exception."""
    return {log.stem: log.read_text(errors="replace").count("Traceback") for log in sorted(logs.glob("*.log"))}


def as_row(result: kills.Storm) -> dict[str, Any]:
    return vars(result) | {"found": vars(result.found), "wrong": result.wrong}


def sum_of_kills(book: Book, where: str) -> dict[str, int]:
    total: dict[str, int] = {}
    for row in book.read():
        if row["part"] == "kills" and row["where"] == where:
            for kind, count in row["kills"].items():
                total[kind] = total.get(kind, 0) + count
    return total


def sum_of_engine_kills(book: Book) -> int:
    return sum(sum(row["kills"].values()) for row in book.read() if row["part"] == "engines")


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--seed", type=int, default=1)
    given.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    given.add_argument("--where", default=",".join(WHERE), help="embedded, services (Postgres and Redis), or both")
    given.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    given.add_argument("--kills", type=int, default=300, help="of each kind, in each deployment")
    given.add_argument("--engine-kills", type=int, default=100, help="of the real engine, two replicas together")
    given.add_argument("--seconds", type=float, default=300.0, help="after so long a round of kills is checked")
    given.add_argument("--rounds", type=int, default=0, help="at most so many rounds of kills; 0 is no bound")
    given.add_argument("--together", action="store_true", help="kill all kinds at once")
    given.add_argument("--book", type=Path, default=Path(".attune/faults.jsonl"), help="what is done is kept here")
    given.add_argument("--only", default="", help="of the other parts, the cases whose name holds this")
    asked = given.parse_args()
    asked.kinds = asked.kinds.split(",")
    book, parts, where = Book(asked.book), asked.parts.split(","), asked.where.split(",")
    for place in where:
        if "kills" in parts:
            asyncio.run(run_kills(book, asked, place))
    asyncio.run(run_others(book, asked, parts))
    if "engines" in parts:
        asyncio.run(run_engines(book, asked))
    print(tables.of(book.read()))
    sys.exit(any(row["wrong"] for row in book.read()))


if __name__ == "__main__":
    main()
