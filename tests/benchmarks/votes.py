"""Measure how many votes the whole service needs until 85 % of its replies are liked: `make bench-votes`.

A run starts what `attune up` starts, with every setting at its default except `--set`, in a new folder with SQLite and
the embedded broker. Simulated users chat and vote on a share of the replies (`--judged`). Every person has a name of
its own and asks one to four questions, so the caps on a rater's and a conversation's share of a batch apply as they do
to real users.

The users' judge rates every reply, whether or not the user votes. The aim is reached when, for the first time, 85 of
the last 100 replies are liked, in the order in which users received them, whatever version gave them. `votes` is a
range: the votes accepted before the first of these 100 replies, and those accepted until the last of them. The versions
in the window had learned from at most the first number when it began; the second is what it took to show it. Many
windows are looked at, and the first that passes is a little lucky, so the run goes on for `--after` replies: their
approval is an estimate without this bias.

A run ends without the aim after `--max-votes`, after `--max-minutes`, or when learning is halted. It is then a line in
`--out` and is not repeated, so the benchmark can be stopped and resumed. The tables have every run in `--out`.
"""

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from app.cli.client import Api
from app.cli.server import LocalDeployment
from app.core.settings import DEMO_MODEL, Settings
from app.core.settings.loading import load_settings
from demo.pretrained import CONFIG, FOLDER
from demo.simulate import ClientStats, SimulatedUsers, UserBehavior
from tests.benchmarks.default_environment import set_default_environment
from tests.benchmarks.results import append_row, read_rows
from tests.benchmarks.votes_figures import (
    Row,
    describe_version,
    find_window,
    summarize,
    table,
    version_rows,
    version_table,
)
from tests.benchmarks.votes_users import CuriousUsers
from tests.support.settings import is_variable

POLL_SECONDS = 1.0
MODELS = {"demo": DEMO_MODEL, "smollm2": FOLDER}
USERS = {"demo": 24}  # concurrent users; DEFAULT_USERS for other models
DEFAULT_USERS = 6


@dataclass(frozen=True)
class Config:
    """What identifies a run. `settings`: those that differ from the defaults."""

    model: str
    judged: float
    settings: tuple[str, ...]
    users: int
    think_seconds: float
    seed: int
    max_votes: int

    @property
    def users_class(self) -> type[SimulatedUsers]:
        return SimulatedUsers if self.model == "demo" else CuriousUsers

    @property
    def behavior(self) -> UserBehavior:
        unrated = 1 - self.judged
        return UserBehavior(self.users, self.think_seconds, unrated_share=unrated, seed=self.seed)

    @property
    def model_path(self) -> Path:
        return MODELS.get(self.model, Path(self.model)).resolve()


async def chat(running: LocalDeployment, config: Config, settings: Settings, after: int, minutes: float) -> Row:
    """Chat until the run ends, and return its figures."""
    users, api = config.users_class(settings, config.behavior), Api(settings)
    task, started = asyncio.create_task(users.run()), time.time()
    ratings, num_printed = users.stats.ratings, 0
    try:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            running.restart_dead_processes()
            if task.done():
                task.result()
            policy = await asyncio.to_thread(api.get, f"/v1/policies/{settings.policy}")
            end, num_votes = find_window(ratings), users.stats.votes.total()
            if end is not None:
                outcome = "reached" if len(ratings) >= end + after else ""
            elif policy["mode"] == "halted":
                outcome = f"halted: {policy['mode_reason']}"
            else:
                outcome = "not reached" if num_votes >= config.max_votes or _minutes_since(started) >= minutes else ""
            versions = await _read_versions(api, settings, users.stats, started)
            for row in versions[num_printed : -1 if not outcome else None]:
                print(f"[{time.time() - started:4.0f} s] {describe_version(row)}", flush=True)
                num_printed += 1
            if outcome:
                break
    finally:
        users.stop()
        await task
    outcomes = await asyncio.to_thread(api.get, f"/v1/policies/{settings.policy}/votes")
    return summarize(ratings, end) | {
        "outcome": outcome,
        "minutes": _minutes_since(started),
        "failures": users.stats.failures,
        "versions": versions,
        "outcomes": {name: outcomes[name] for name in ("learned", "waiting", "not_learned", "by_reason", "delays")},
    }


def _minutes_since(started: float) -> float:
    return (time.time() - started) / 60


async def _read_versions(api: Api, settings: Settings, stats: ClientStats, started: float) -> list[Row]:
    path = f"/v1/policies/{settings.policy}"
    versions = await asyncio.to_thread(api.get, f"{path}/versions", limit=1000)
    updates = await asyncio.to_thread(api.list_all, f"{path}/updates")
    return version_rows(versions["data"], updates, stats, started)


def run(config: Config, after: int, minutes: float) -> Row:
    """Run one fresh deployment in a temporary directory."""
    if not (config.model_path / CONFIG).exists():
        raise SystemExit(f"{config.model_path} has no {CONFIG}; `make smollm2` makes the folder of smollm2")
    with tempfile.TemporaryDirectory(prefix="attune-votes-") as home:
        set_environment(config, home)
        settings = load_settings().settings
        with LocalDeployment(settings, lambda message: print(message, file=sys.stderr, flush=True)) as running:
            return asdict(config) | asyncio.run(chat(running, config, settings, after, minutes))


def set_environment(config: Config, home: str) -> None:
    """Set every setting to its default, except for `--set` and for what separates runs."""
    changes = {"ATTUNE_TRAINER__SEED": str(config.seed), **dict(map(parse_setting, config.settings))}
    set_default_environment(home, config.model_path, **changes)


def parse_setting(change: str) -> tuple[str, str]:
    """Example: "ATTUNE_TRAINER__SEED=24" -> ("ATTUNE_TRAINER__SEED", "24"). Raises ValueError."""
    name, separator, value = change.partition("=")
    if not separator or not is_variable(name):
        raise ValueError(f"{change}: expected ATTUNE_NAME=VALUE with the name of a setting (docs/settings.md)")
    return name, value


def is_same_run(result: Row, config: Config) -> bool:
    return Config(**{name: _restore(result[name]) for name in asdict(config)}) == config


def _restore(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="demo, smollm2 (`make smollm2` makes it), or a model's folder")
    parser.add_argument("--judged", type=float, default=0.9, help="share of the replies that users vote on")
    parser.add_argument("--set", nargs="+", default=[], metavar="ATTUNE_NAME=VALUE", help="settings to change")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--users", type=int, default=None, help="concurrent users; 24 for demo, else 6")
    parser.add_argument(
        "--think-seconds",
        type=float,
        default=UserBehavior.think_seconds,
        help="mean time between a reply and the next message; more where the trainer cannot follow the votes",
    )
    parser.add_argument("--max-votes", type=int, default=1500)
    parser.add_argument("--max-minutes", type=float, default=60.0)
    parser.add_argument("--after", type=int, default=100, help="replies that are judged after the aim is reached")
    parser.add_argument("--out", type=Path, default=Path(".attune/votes.jsonl"))
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    users, changes = args.users or USERS.get(args.model, DEFAULT_USERS), tuple(sorted(args.set))
    for change in changes:
        try:
            parse_setting(change)
        except ValueError as error:
            parser.error(str(error))
    for seed in args.seeds:
        config = Config(args.model, args.judged, changes, users, args.think_seconds, seed, args.max_votes)
        if any(is_same_run(result, config) for result in read_rows(args.out)):
            continue
        result = run(config, args.after, args.max_minutes)
        append_row(args.out, result)
        print(f"\n{args.model}, seed {seed}: {result['outcome']}, votes {result['votes']}\n\n{version_table(result)}")
    print(f"\n{table(read_rows(args.out))}")


if __name__ == "__main__":
    main()
