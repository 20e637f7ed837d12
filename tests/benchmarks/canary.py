"""Measure how a worse, an equal and a better version end as a canary: `make bench-canary`.

The whole service runs with the real engine. The demo's simulated users (thousands, each with a few messages) chat and
vote. A version is released to a share of them, and the canary monitor decides. A finished run is a line in `--out`
and is not repeated, so the benchmark can be stopped and resumed. The table at the end has every run in `--out`.
"""

import argparse
import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from alignment.release.canary import CanaryConfig
from app.models import VersionState
from demo.recompute_logprobs import check_logprobs
from demo.simulate import SimulatedUsers, UserBehavior
from tests.benchmarks.canary_deployment import Harness, harness, read_progress
from tests.benchmarks.canary_results import count_misnamed, read_results
from tests.benchmarks.canary_versions import Candidate, trained_versions
from tests.benchmarks.deployment import machine
from tests.benchmarks.results import append_row, read_rows

BEFORE, AFTER = 3.0, 6.0  # seconds of chat before the canary starts, and after it has ended
LOG_SECONDS = 20.0
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """`manual`: the version has been live before, and `attune deploy` starts the canary; otherwise it is new.

    `update_after`: the trainer runs one update after the canary.
    """

    candidate: str
    share: float = 0.05
    patience: float = 1800.0
    manual: bool = False
    update_after: bool = False

    @property
    def config(self) -> CanaryConfig:
        return CanaryConfig(share=self.share, patience_seconds=self.patience)


CASES = {
    "worse": Case("worse", update_after=True),
    "worse, manual": Case("worse", manual=True),
    "better": Case("better", share=0.2),  # a share of 0.05 takes four times as long
    "equal": Case("serving", share=0.2, patience=300.0),
}
COLUMNS = {
    "held-out approval: canary, live": lambda row: f"{row['approval']:.0%}, {row['approval_live']:.0%}",
    "end": lambda row: row["end"],
    "s": lambda row: f"{row['seconds']:.0f}",
    "turns": lambda row: f"{row['turns']:,}",
    "users": lambda row: f"{row['users']:,}",
    "canary users (share; target)": lambda row: (
        f"{row['canary_users']} ({row['share']:.1%}; {row['target_share']:.0%})"
    ),
    "raters of the canary": lambda row: str(row["raters"]),
    "s from decisive vote to end": lambda row: _seconds(row["decisive_to_end"]),
    "s from decisive vote to last canary turn": lambda row: _seconds(
        row["decisive_to_last_turn"], row["end"] == "rolled back"
    ),
    "failed, cut, misnamed": lambda row: str(row["num_failures"]),
}


async def run(
    deployment: Harness, name: str, case: Case, candidates: dict[str, Candidate], seed: int, behavior: UserBehavior
) -> Row:
    """Run one canary from its start to its end."""
    candidate, serving = candidates[case.candidate], candidates["serving"]
    await deployment.set_delivery(None if case.manual else case.config)
    # before the users start
    live_version = await deployment.publish(candidate.version, VersionState.LIVE) if case.manual else None
    await deployment.post("rollback", version=deployment.stable)
    users = SimulatedUsers(deployment.settings, behavior)
    chat_task = asyncio.create_task(users.run())
    try:
        await asyncio.sleep(BEFORE)
        if live_version is not None:
            print(
                await deployment.run_command("deploy", str(live_version.number), "--share", str(case.share)), flush=True
            )
        canary = live_version or await deployment.publish(candidate.version, VersionState.CANARY)
        since = (await deployment.deployment()).canary_since
        assert since is not None
        await _wait_for_end(deployment, f"{name}, seed {seed}", 2 * case.config.patience_seconds)
        await asyncio.sleep(AFTER)
    finally:
        users.stop()
        await chat_task
    stats, results = users.stats, await read_results(deployment.db, canary.id, since, case.config)
    failures = {
        **stats.failures,
        "not done": results.pop("not_done"),
        "misnamed": await count_misnamed(deployment.db, stats.versions),
    }
    expected = deployment.stable if results["end"] == "rolled back" else canary.number
    return {
        "case": name,
        "seed": seed,
        "target_share": case.share,
        "approval": candidate.approval,
        "approval_live": serving.approval,
        **results,
        "replies": stats.replies,
        "num_failures": sum(failures.values()) + len(stats.errors),
        "failures": failures,
        "errors": stats.errors[:5],
        "head_is_correct": await deployment.head_number() == expected,
    }


async def _wait_for_end(deployment: Harness, what: str, patience: float) -> None:
    """Wait until the canary monitor has ended the canary, and print its verdict from time to time."""
    start = last_log = time.monotonic()
    while (await deployment.deployment()).canary_version_id is not None:
        await asyncio.sleep(0.1)
        if time.monotonic() - last_log > LOG_SECONDS:
            last_log = time.monotonic()
            if (canary := (await deployment.read_deployment())["canary"]) is not None:
                print(f"{what}: {canary['verdict']}, {canary['reason']}", flush=True)
        if time.monotonic() - start > patience:
            raise TimeoutError(f"{what} has not ended in {patience:.0f} s")


async def _update_after(deployment: Harness, serving: Candidate) -> Row:
    """Run one update after the rollback of a canary. Return its parent, the behavior versions and the progress."""
    version = await deployment.run_update()
    assert version.parent_id and version.batch_id and version.adapter_path
    parent = await deployment.version(version.parent_id)
    behavior_versions = {
        (await deployment.version(id)).number for id in await deployment.behavior_version_ids(version.batch_id)
    }
    before, after = read_progress(serving.version.folder), read_progress(Path(version.adapter_path))
    return {"parent": parent.number, "behavior_versions": sorted(behavior_versions), "progress": [before, after]}


async def bench(args: argparse.Namespace, seed: int, cases: Sequence[str]) -> None:
    """Run the cases of one seed in sequence on one deployment, and recompute the log-probs of all replies."""
    candidates = await asyncio.to_thread(trained_versions, args.out.parent / "canary", args.taught, args.max_updates)
    async with harness(candidates["serving"].version, args.database, seed) as deployment:
        for number, name in enumerate(CASES):
            if name not in cases:
                continue
            behavior = UserBehavior(
                users=args.people,
                think_seconds=args.think,
                leave_share=args.leaves,
                seed=1 + len(CASES) * seed + number,
            )
            case = CASES[name] if args.patience is None else replace(CASES[name], patience=args.patience)
            save(args.out, await run(deployment, name, case, candidates, seed, behavior))
            if case.update_after:
                save(
                    args.out,
                    {"update after": name, "seed": seed, **await _update_after(deployment, candidates["serving"])},
                )
        save(
            args.out,
            {"recomputed": cases, "seed": seed, **asdict(await check_logprobs(deployment.db, deployment.settings))},
        )


def save(out: Path, row: Row) -> None:
    print(row, flush=True)
    append_row(out, row)


def table(rows: Iterable[Row]) -> str:
    cases = sorted(
        (row for row in rows if "case" in row), key=lambda row: (list(CASES).index(row["case"]), row["seed"])
    )
    lines = ["| version | seed | " + " | ".join(COLUMNS) + " |", "|" + "---|" * (2 + len(COLUMNS))]
    for row in cases:
        cells = " | ".join(format_cell(row) for format_cell in COLUMNS.values())
        lines.append(f"| {row['case']} | {row['seed']} | {cells} |")
    return "\n".join(lines)


def _seconds(value: float | None, applies: bool = True) -> str:
    return "–" if value is None or not applies else f"{value:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="seeds of the users and of sampling")
    parser.add_argument("--taught", type=int, default=0, help="seed of the training of the versions")
    parser.add_argument(
        "--people", type=int, default=16, help="simulated users at a time; a new one replaces each that leaves"
    )
    parser.add_argument("--think", type=float, default=0.3, help="mean seconds between two messages")
    parser.add_argument(
        "--leaves", type=float, default=0.9, help="share of users that leave after a reply that is not the last"
    )
    parser.add_argument("--patience", type=float, help="seconds until the statistics must decide, in every case")
    parser.add_argument("--max-updates", type=int, help="train the versions with at most this many updates each")
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--out", type=Path, default=Path(".attune/canary.jsonl"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{machine()}; {args.database}, {args.people} users at a time\n", flush=True)
    for seed in args.seeds:
        finished = {row["case"] for row in read_rows(args.out) if "case" in row and row["seed"] == seed}
        if cases := [name for name in args.cases if name not in finished]:
            asyncio.run(bench(args, seed, cases))
    rows = read_rows(args.out)
    print(f"\n{table(rows)}\n")
    for row in rows:
        if "update after" in row:
            print(f"seed {row['seed']}, after '{row['update after']}': the next version's parent is v{row['parent']}")
        if "recomputed" in row:
            print(f"seed {row['seed']}: {row['mislabelled']} of {row['replies']} replies are from another version")


if __name__ == "__main__":
    main()
