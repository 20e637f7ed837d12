"""Send votes by every intake route through an outage, and compare what the service counts: `make bench-intake`.

Each route has a new database and one API process. Votes are changed and withdrawn, changes arrive out of order, and a
twentieth of them is repeated. When half of the votes are recorded, the API is killed (SIGKILL) and started again after
the outage. At the end each vote must be counted once, in its last state.
"""

import argparse
import asyncio
import logging
import sys
import time
from dataclasses import dataclass

from sqlalchemy import func, select

from app.core.database import Database
from app.models import Feedback, Policy, TurnMetadata, Version
from tests.benchmarks.deployment import DATABASES, Deployment, deployment, machine
from tests.benchmarks.intake_clients import CLIENTS
from tests.benchmarks.intake_routes import ROUTES, Route, completion_id, message_id
from tests.benchmarks.intake_votes import Comparison, Traffic, compare, make_traffic
from tests.support.turns import make_turn

ALL_ROUTES = (*ROUTES, *CLIENTS)
POLL_SECONDS = 0.1
HEADER = "| route | database | changes | sent again | votes that count | counted | wrong | changes/s |"


@dataclass(frozen=True)
class Result:
    """One route on one database. `seconds` are those of the whole sending, without the time that the API was away."""

    route: str
    database: str
    traffic: Traffic
    num_sent: int
    comparison: Comparison
    seconds: float

    def row(self) -> str:
        numbers = (
            self.traffic.num_changes,
            self.num_sent - self.traffic.num_changes,
            self.traffic.num_expected,
            self.comparison.num_counted,
            len(self.comparison.wrong),
            round(self.traffic.num_changes / self.seconds),
        )
        return f"| {self.route} | {self.database} | {' | '.join(f'{number:,}' for number in numbers)} |"


async def create_turns(db: Database, count: int) -> None:
    """Create the replies that the votes are about, each sent with its message's id."""
    async with db.write() as session:
        policy, version = (await session.scalars(select(Policy))).one(), (await session.scalars(select(Version))).one()
        for vote in range(count):
            metadata = {"message-id": message_id(vote)}
            session.add(make_turn(policy, version, completion_id(vote), request_metadata=metadata))
        await session.flush()
        session.add_all(
            TurnMetadata(
                turn_id=completion_id(vote), key="message-id", value=message_id(vote), project_id=policy.project_id
            )
            for vote in range(count)
        )


async def count_feedback(db: Database) -> int:
    async with db.read() as session:
        return (await session.execute(select(func.count()).select_from(Feedback))).scalar_one()


async def interrupt(target: Deployment, after: int, seconds: float) -> float:
    """Kill the API when this much feedback is recorded, and start it again. Returns the seconds it was away."""
    while await count_feedback(target.db) < after:
        await asyncio.sleep(POLL_SECONDS)
    killed_at = time.monotonic()
    target.running.kill("api")
    await asyncio.sleep(seconds)
    await asyncio.to_thread(target.running.start, "api")
    return time.monotonic() - killed_at


async def run(route: Route, database: str, num_votes: int, outage_seconds: float) -> Result:
    """Send all votes by one route on a new database of this kind."""
    traffic = make_traffic(num_votes, route.options)
    async with deployment(database, "http://127.0.0.1:9", langfuse__intake=True) as target:
        await create_turns(target.db, num_votes)
        began_at = time.monotonic()
        outage = asyncio.create_task(interrupt(target, num_votes // 2, outage_seconds))
        try:
            num_sent = await route.send(target, traffic)
            seconds = time.monotonic() - began_at - await outage
        finally:
            outage.cancel()
        comparison = await compare(target.db, traffic)
    return Result(route.name, database, traffic, num_sent, comparison, seconds)


async def run_all(routes: list[Route], databases: list[str], num_votes: int, outage_seconds: float) -> int:
    """Print the table, a row when it is measured. Returns the number of votes that are counted wrongly."""
    print(HEADER, "|---|---|" + "---:|" * 6, sep="\n", flush=True)
    num_wrong = 0
    for database in databases:
        for route in routes:
            result = await run(route, database, num_votes, outage_seconds)
            print(result.row(), flush=True)
            num_wrong += len(result.comparison.wrong)
            for vote, counted in sorted(result.comparison.wrong.items())[:10]:
                print(f"vote {vote}: counted {counted}, not {result.traffic.expected[vote]}", file=sys.stderr)
    return num_wrong


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench-intake ATTUNE_BENCH_FLAGS=", description=__doc__)
    parser.add_argument("--votes", type=int, default=10_000)
    parser.add_argument("--outage", type=float, default=120.0, help="seconds", metavar="SECONDS")
    parser.add_argument("--databases", nargs="+", choices=DATABASES, default=list(DATABASES))
    parser.add_argument("--routes", default="", help="those alone whose name has this text")
    args = parser.parse_args()
    for name in ("attune_client", "attune_openwebui"):  # they tell of each change that came too late, or waits
        logging.getLogger(name).setLevel(logging.ERROR)
    print(machine())
    print(f"{args.votes:,} votes by each route, {args.outage:g} s without the API\n")
    routes = [route for route in ALL_ROUTES if args.routes in route.name]
    sys.exit(bool(asyncio.run(run_all(routes, args.databases, args.votes, args.outage))))


if __name__ == "__main__":
    main()
