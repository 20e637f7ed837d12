"""Let two policies with different algorithms learn side by side from one crowd: `make bench-policies`.

Starts what `attune up` starts, with every setting at its default, in a new folder. The simulated users ask for one
policy (`--first`, PPO by default); the other one (`--second`, KTO) answers half of them. Each learns from the votes on
its own replies. A policy that has made `--updates` updates is not trained any more and goes on answering its half,
until its last version has `--replies` replies too.

The users' judge rates every reply, whether or not the user votes: approval is the share of the replies of a version
that it likes, with a 95 % Wilson interval. The result is a line in `--out`, and the table has every run in it.
"""

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from alignment.signals.proportions import Share
from app.cli.client import Api
from app.cli.server import LocalDeployment
from app.core.settings import DEMO_MODEL, Settings
from app.core.settings.loading import load_settings
from demo.simulate import Rating, SimulatedUsers, UserBehavior
from tests.benchmarks.default_environment import set_default_environment
from tests.benchmarks.results import append_row, read_rows
from tests.benchmarks.votes_figures import Row

POLL_SECONDS = 2.0
FIRST, SECOND = "assistant", "challenger"


def describe_approval(ratings: Sequence[Rating]) -> Row:
    good, total = sum(rating.approved for rating in ratings), len(ratings)
    return {"good": good, "replies": total, "interval": Share(good, total).interval()}


class Side:
    """One of the two policies: what it has done so far."""

    def __init__(self, name: str, algorithm: str, updates: int, replies: int) -> None:
        self.name, self.algorithm, self.updates, self.replies = name, algorithm, updates, replies
        self.versions: list[Row] = []
        self.minutes: float | None = None  # until its last update was live
        self.halted: str | None = None

    @property
    def live(self) -> list[Row]:
        """The trained versions that went live, by number."""
        return [row for row in self.versions if row["number"] and row["live_at"] is not None]

    def observe(self, api: Api, started: float) -> None:
        """Read the policy's versions, and stop its training after the last update."""
        path = f"/v1/policies/{self.name}"
        self.versions = api.get(f"{path}/versions", limit=1000)["data"]
        if self.minutes is None and len(self.live) >= self.updates:
            self.minutes = (self.live[self.updates - 1]["live_at"] - started) / 60
            api.post(f"{path}/training/pause", {"reason": "the benchmark's last update"})
        elif self.minutes is None and (policy := api.get(path))["mode"] == "halted":
            self.halted = policy["mode_reason"]

    def is_done(self, ratings: Iterable[Rating]) -> bool:
        if self.halted is not None:
            return True
        return self.minutes is not None and sum(one.version == self.last for one in ratings) >= self.replies

    @property
    def last(self) -> str:
        """The version that serves."""
        return next(row["name"] for row in reversed(self.versions) if row["serving"])

    def summarize(self, ratings: Sequence[Rating], updates: Sequence[Row]) -> Row:
        own = [rating for rating in ratings if rating.version.startswith(f"{self.name}@")]
        return {
            "policy": self.name,
            "algorithm": self.algorithm,
            "before": describe_approval([rating for rating in own if rating.version == f"{self.name}@v0"]),
            "after": describe_approval([rating for rating in own if rating.version == self.last]),
            "updates": len(self.live),
            "rejected": sum(row["state"] == "rejected" for row in self.versions),
            "samples": sum(row["samples"] for row in updates if row["state"] == "trained"),
            "votes": sum(rating.voted_at is not None for rating in own),
            "replies": len(own),
            "minutes": self.minutes,
            "halted": self.halted,
        }


async def chat(
    running: LocalDeployment, settings: Settings, sides: Sequence[Side], behavior: UserBehavior, minutes: float
) -> Row:
    """Chat until both policies are done or `minutes` are over, and return the figures."""
    users, api = SimulatedUsers(settings, behavior, FIRST), Api(settings)
    task, started, printed = asyncio.create_task(users.run()), time.time(), ""
    try:
        while time.time() - started < 60 * minutes:
            await asyncio.sleep(POLL_SECONDS)
            running.restart_dead_processes()
            if task.done():
                task.result()
            for side in sides:
                await asyncio.to_thread(side.observe, api, started)
            line = ", ".join(f"{side.last} ({side.algorithm})" for side in sides)
            if line != printed:
                print(f"[{time.time() - started:4.0f} s] {line}: {users.stats.votes.total()} votes", flush=True)
                printed = line
            if all(side.is_done(users.stats.ratings) for side in sides):
                break
    finally:
        users.stop()
        await task
    updates = {side.name: api.list_all(f"/v1/policies/{side.name}/updates") for side in sides}
    return {
        "seed": behavior.seed,
        "failures": users.stats.failures,
        "total_minutes": (time.time() - started) / 60,
        "policies": [side.summarize(users.stats.ratings, updates[side.name]) for side in sides],
    }


def run(args: argparse.Namespace) -> Row:
    """Run one fresh deployment in a temporary directory."""
    with tempfile.TemporaryDirectory(prefix="attune-policies-") as home:
        set_default_environment(home, DEMO_MODEL)
        settings = load_settings().settings
        with LocalDeployment(settings, lambda message: print(message, file=sys.stderr, flush=True)) as running:
            api = Api(settings)
            first, second = json.loads(args.first), json.loads(args.second)
            api.patch(f"/v1/policies/{FIRST}", {"settings": first})
            body = {"name": SECOND, "settings": second, "traffic": {"from": FIRST, "share": 0.5}}
            sides = [
                Side(view["name"], view["settings"]["algorithm"]["type"], args.updates, args.replies)
                for view in (api.get(f"/v1/policies/{FIRST}"), api.post("/v1/policies", body))
            ]
            behavior = UserBehavior(users=args.users, seed=args.seed)
            return asyncio.run(chat(running, settings, sides, behavior, args.max_minutes))


def table(results: Iterable[Row]) -> str:
    """Return a Markdown table with one row per policy and run."""
    lines = [
        "| seed | policy | algorithm | approval of v0 | approval of the last version | updates | rejected | samples "
        "| votes | replies | minutes |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        for row in result["policies"]:
            minutes = row["halted"] or ("–" if row["minutes"] is None else f"{row['minutes']:.1f}")
            cells: list[Any] = [result["seed"], row["policy"], row["algorithm"]]
            cells += [_format_approval(row["before"]), _format_approval(row["after"])]
            cells += [row[name] for name in ("updates", "rejected", "samples", "votes", "replies")]
            lines.append(f"| {' | '.join(map(str, [*cells, minutes]))} |")
    return "\n".join(lines)


def _format_approval(row: Row) -> str:
    if row["interval"] is None:
        return "–"
    low, high = row["interval"]
    return f"{row['good'] / row['replies']:.0%} ({low:.0%}–{high:.0%}) of {row['replies']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", default='{"algorithm": "ppo"}', help="own settings of the policy that users ask for")
    parser.add_argument("--second", default='{"algorithm": "kto"}', help="own settings of the other policy")
    parser.add_argument("--updates", type=int, default=20, help="of each policy")
    parser.add_argument("--replies", type=int, default=150, help="of each last version, for its approval")
    parser.add_argument("--users", type=int, default=UserBehavior.users, help="concurrent users")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-minutes", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=Path(".attune/policies.jsonl"))
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    result = run(args)
    append_row(args.out, result)
    failures = sum(result["failures"].values())
    print(f"\n{failures} replies refused, incomplete or mislabelled; {result['total_minutes']:.1f} minutes in all\n")
    print(table(read_rows(args.out)))
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
