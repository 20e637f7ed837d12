"""Measure how collection and training overlap, on the whole service: `python -m tests.benchmarks.overlap`.

The demo's simulated users chat with a deployment, which has the real engine and the real trainer, until a number of
updates is live. Rewards come from votes and from the user's next message (awaited for up to ten seconds),
so a sample may be ready only after the policy has changed. The configurations (rows) alternate in order and in reverse
order, so that other load on the machine affects all of them. A cell is the median over the runs of its row.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from statistics import fmean, median

from sqlalchemy import func, select

from app.cli.server import LocalDeployment
from app.core.database import Database
from app.core.settings import Settings
from app.core.settings.loading import load_settings
from app.models import Batch, BatchState, Sample, SampleState, Turn, Version
from demo.run import RECIPE
from demo.simulate import SimulatedUsers, UserBehavior
from tests.support.engine_fixture import free_port

ROWS = {
    "0": {"ATTUNE_TRAINER__MAX_STALENESS": "0"},
    "1": {"ATTUNE_TRAINER__MAX_STALENESS": "1"},
    "4": {"ATTUNE_TRAINER__MAX_STALENESS": "4"},
    "any": {},
}
REWARDS = {"sources": [{"type": "explicit"}, {"type": "next_turn", "window_seconds": 10}]}
FIRST = 2  # the first update with a predecessor during which samples could be collected
MAX_UPDATE_SECONDS = 90.0
COLUMNS = {
    "updates per minute": "{:.2f}",
    "collected during the previous update": "{:.0%}",
    "trainer busy": "{:.0%}",
    "s from a live version to the next batch": "{:.1f}",
    "samples 0, 1, 2+ versions behind": "{}",
    "dropped as stale": "{:.0%}",
    "s from a reply to a live version trained on it": "{:.1f}",
}
Figures = dict[str, float | tuple[float, ...]]


async def chat(running: LocalDeployment, settings: Settings, updates: int) -> None:
    """Chat until version number `updates` is live. Raises TimeoutError."""
    users, db = SimulatedUsers(settings, UserBehavior()), Database(settings.database_url)
    chat_task = asyncio.create_task(users.run())
    deadline = time.monotonic() + MAX_UPDATE_SECONDS * (updates + 1)
    try:
        while True:
            await asyncio.sleep(0.5)
            running.restart_dead_processes()
            if chat_task.done():
                chat_task.result()
            async with db.read() as session:
                served = await session.scalar(select(func.max(Version.number)).where(Version.live_at.is_not(None)))
            if (served or 0) >= updates:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"v{served} after {MAX_UPDATE_SECONDS * (updates + 1):.0f} s; see {settings.logs_dir}"
                )
    finally:
        users.stop()
        await chat_task
        await db.close()


async def measure(settings: Settings, updates: int) -> Figures:
    db = Database(settings.database_url)
    async with db.read() as session:
        versions = {row.id: row for row in await session.scalars(select(Version))}
        trained = await session.scalars(
            select(Batch).where(Batch.state == BatchState.TRAINED).order_by(Batch.created_at, Batch.id)
        )
        batches = [batch for batch in trained if versions[batch.version_id or ""].number <= updates]
        rows_used = await session.execute(
            select(Sample.batch_id, Sample.version_id, Turn.created_at, Turn.finished_at)
            .join(Turn, Turn.id == Sample.turn_id)
            .where(Sample.batch_id.in_([batch.id for batch in batches]))
            .order_by(Sample.turn_id)
        )
        states = Counter(await session.scalars(select(Sample.state)))
        stale = await session.scalar(
            select(func.count()).where(Sample.state == SampleState.DROPPED, Sample.reason.like("stale%"))
        )
    await db.close()
    samples_by_batch = defaultdict(list)
    for row in rows_used:
        samples_by_batch[row.batch_id].append(row)
    samples_by_lag: Counter[int] = Counter()
    overlap, waits, delays, busy_seconds = [], [], [], 0.0
    for previous, batch in zip(batches[FIRST - 2 :], batches[FIRST - 1 :], strict=False):
        parent, child = versions[batch.parent_id], versions[batch.version_id or ""]
        rows = samples_by_batch[batch.id]
        for row in rows:
            samples_by_lag[min(2, parent.number - versions[row.version_id].number)] += 1
        assert parent.live_at and child.live_at and batch.settled_at and batch.claimed_at
        overlap.append(fmean(previous.created_at <= row.created_at < parent.live_at for row in rows))
        waits.append(batch.created_at - parent.live_at)
        delays.append(child.live_at - fmean(row.finished_at for row in rows))
        busy_seconds += batch.settled_at - batch.claimed_at
    first, last = versions[batches[FIRST - 2].version_id or ""].live_at, versions[batches[-1].version_id or ""].live_at
    assert first and last
    return {
        "updates per minute": 60 * len(waits) / (last - first),
        "collected during the previous update": fmean(overlap),
        "trainer busy": busy_seconds / (last - first),
        "s from a live version to the next batch": fmean(waits),
        "samples 0, 1, 2+ versions behind": tuple(samples_by_lag[lag] / samples_by_lag.total() for lag in range(3)),
        "dropped as stale": (stale or 0) / states.total(),
        "s from a reply to a live version trained on it": fmean(delays),
    }


def run(row: str, updates: int, seed: int) -> Figures:
    """Measure one fresh deployment in a temporary directory."""
    with tempfile.TemporaryDirectory(prefix="attune-overlap-") as home:
        os.environ |= {
            **RECIPE,
            "ATTUNE_TRAINER__MAX_BATCH_SIZE": RECIPE["ATTUNE_TRAINER__BATCH_SIZE"],
            **ROWS[row],
            "ATTUNE_HOME": home,
            "ATTUNE_TRAINER__SEED": str(seed),
            "ATTUNE_SERVER__PORT": str(free_port()),
            "ATTUNE_ENGINE__PORT": str(free_port()),
            "ATTUNE_REWARDS": json.dumps(REWARDS),
            "OMP_NUM_THREADS": "1",
        }
        settings = load_settings().settings
        with LocalDeployment(settings, lambda message: print(message, file=sys.stderr, flush=True)) as running:
            asyncio.run(chat(running, settings, updates))
            return asyncio.run(measure(settings, updates))


def table(results: dict[str, list[Figures]]) -> str:
    lines = ["| max_staleness | runs | " + " | ".join(COLUMNS) + " |", "|" + "---|" * (2 + len(COLUMNS))]
    for row, runs in results.items():
        cells = [_cell(runs, name) for name in COLUMNS]
        lines.append(f"| {row} | {len(runs)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(runs: list[Figures], name: str) -> str:
    if isinstance(runs[0][name], tuple):
        lags = zip(*(figures[name] for figures in runs), strict=True)
        return ", ".join(f"{median(shares):.0%}" for shares in lags)
    return COLUMNS[name].format(median(figures[name] for figures in runs))  # type: ignore[type-var]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(".attune/overlap.jsonl"))
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for name in (
        "ATTUNE_DATABASE__URL",
        "ATTUNE_BROKER__URL",
        "ATTUNE_API_KEY",
        "ATTUNE_MODEL",
        "ATTUNE_TRAINER__MAX_STALENESS",
    ):
        os.environ.pop(name, None)
    results: dict[str, list[Figures]] = {row: [] for row in args.rows}
    for number in range(args.runs):
        for row in args.rows[:: -1 if number % 2 else 1]:
            os.environ.pop("ATTUNE_TRAINER__MAX_STALENESS", None)
            figures = run(row, args.updates, seed=number)
            results[row].append(figures)
            with args.out.open("a") as file:
                file.write(json.dumps({"row": row, "run": number, "updates": args.updates} | figures) + "\n")
            print(f"{row}, run {number}: {figures}", flush=True)
    print(f"\n{table(results)}")


if __name__ == "__main__":
    main()
