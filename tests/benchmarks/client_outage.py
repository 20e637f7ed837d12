"""Count votes that a client gives through an outage of the API: `python -m tests.benchmarks.client_outage`.

The API is killed (SIGKILL) after a sixth of the votes and started again after the outage, while the client goes on
voting through its offline queue, which delivers in the background.
"""

import argparse
import asyncio
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from attune_client import Attune, FeedbackQueue
from sqlalchemy import select

from app.models import Feedback, Policy, Version, new_id
from tests.benchmarks.deployment import Deployment, deployment, machine
from tests.support.turns import make_turn

NUM_TURNS = 100
FLUSH_SECONDS = 300.0


@dataclass(frozen=True)
class Outage:
    """The ids of the votes that the client stored and of those that the service recorded, and what was measured."""

    stored: list[str]
    recorded: list[str]  # one for each row
    waiting_at_restart: int
    slowest_vote_seconds: float
    seconds_to_deliver: float  # from the restart of the API on

    @property
    def num_lost(self) -> int:
        return len(set(self.stored) - set(self.recorded))

    @property
    def num_extra(self) -> int:
        return sum((Counter(self.recorded) - Counter(self.stored)).values())


async def create_turns(target: Deployment) -> list[str]:
    async with target.db.write() as session:
        policy, version = (await session.scalars(select(Policy))).one(), (await session.scalars(select(Version))).one()
        turns = [make_turn(policy, version, new_id("chatcmpl")) for _ in range(NUM_TURNS)]
        session.add_all(turns)
        return [turn.id for turn in turns]


def vote(queue: FeedbackQueue, turns: list[str], count: int, seconds: float) -> tuple[list[str], float]:
    """Give votes of different people, evenly over this time. Returns their ids and the seconds of the slowest one."""
    began_at, ids, slowest = time.monotonic(), [], 0.0
    for number in range(count):
        time.sleep(max(0.0, began_at + seconds * number / count - time.monotonic()))
        before = time.monotonic()
        ids.append(queue.up(turns[number % len(turns)], source=f"user-{number}"))
        slowest = max(slowest, time.monotonic() - before)
    return ids, slowest


async def run(num_votes: int, outage_seconds: float, folder: Path) -> Outage:
    """Run the outage on a new SQLite database. Votes come for the whole of it, and a fifth longer before and after."""
    async with deployment("sqlite", "http://127.0.0.1:9") as target:
        turns = await create_turns(target)
        total_seconds = 1.4 * outage_seconds
        with Attune(target.url, target.key) as client, client.queue(folder / "votes.db") as queue:
            voting = asyncio.create_task(asyncio.to_thread(vote, queue, turns, num_votes, total_seconds))
            await asyncio.sleep(0.2 * outage_seconds)
            target.running.kill("api")
            await asyncio.sleep(outage_seconds)
            waiting, restarted_at = queue.pending, time.monotonic()
            await asyncio.to_thread(target.running.start, "api")
            stored, slowest = await voting
            await asyncio.to_thread(queue.flush, FLUSH_SECONDS)
            seconds_to_deliver = time.monotonic() - restarted_at
        async with target.db.read() as session:
            recorded = list(await session.scalars(select(Feedback.idempotency_key)))
    return Outage(stored, recorded, waiting, slowest, seconds_to_deliver)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.client_outage", description=__doc__)
    parser.add_argument("--votes", type=int, default=10_000)
    parser.add_argument("--outage-seconds", type=float, default=120)
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        result = asyncio.run(run(args.votes, args.outage_seconds, Path(folder)))
    print(machine())
    print(f"{len(result.stored)} votes stored, {len(result.recorded)} recorded: ", end="")
    print(f"{result.num_lost} lost, {result.num_extra} counted twice or never stored")
    print(f"{result.waiting_at_restart} waited when the API was back after {args.outage_seconds:g} s; ", end="")
    print(f"all delivered {result.seconds_to_deliver:.1f} s after the restart; ", end="")
    print(f"slowest vote {1000 * result.slowest_vote_seconds:.0f} ms")


if __name__ == "__main__":
    main()
