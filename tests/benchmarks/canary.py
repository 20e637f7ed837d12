"""What becomes of a worse, an equal and a better version beside what serves: `make bench-canary`.

The whole service with the real engine; the demo's shoppers, thousands of users who speak once or a few times, chat and
judge. A version goes out to a share of them and is left to itself. A finished run is a line in `--out` and is not
made again, so this can be stopped and taken up; the table at the end is of all that is there.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from alignment.release.canary import CanaryConfig
from app.models import VersionState
from demo.recompute_logprobs import check_logprobs
from demo.simulate import SimulatedUsers, UserBehavior
from tests.benchmarks.canary_deployment import Harness, harness, progress
from tests.benchmarks.canary_readings import misnamed, read
from tests.benchmarks.canary_versions import Candidate, trained_versions
from tests.benchmarks.deployment import machine

BEFORE, AFTER = 3.0, 6.0  # seconds that people chat before it goes out, and after it has ended
TELL_SECONDS = 20.0
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """`by_hand`: the version has been heard before, and `attune deploy` sends it out; else it comes from the trainer.
    `learns`: afterwards the trainer makes one update."""

    candidate: str
    share: float = 0.05
    patience: float = 1800.0
    by_hand: bool = False
    learns: bool = False

    @property
    def config(self) -> CanaryConfig:
        return CanaryConfig(share=self.share, patience_seconds=self.patience)


CASES = {
    "worse": Case("worse", learns=True),
    "worse, by hand": Case("worse", by_hand=True),
    "better": Case("better", share=0.2),  # at a twentieth, four times as long
    "equal": Case("serving", share=0.2, patience=300.0),
}
COLUMNS = {
    "held-out approval, beside": lambda row: f"{row['approval']:.0%}, {row['approval_beside']:.0%}",
    "end": lambda row: row["end"],
    "s": lambda row: f"{row['seconds']:.0f}",
    "turns": lambda row: f"{row['turns']:,}",
    "users": lambda row: f"{row['users']:,}",
    "of them heard it": lambda row: f"{row['seen_by']} ({row['share']:.1%} of {row['asked_share']:.0%})",
    "rated it": lambda row: str(row["rated"]),
    "s from clear to ended": lambda row: _seconds(row["clear_to_end"]),
    "s from clear to its last turn": lambda row: _seconds(row["clear_to_last_turn"], row["end"] == "taken back"),
    "failed, cut, misnamed": lambda row: str(row["troubled"]),
}


async def run(there: Harness, name: str, candidates: dict[str, Candidate], seed: int, behavior: UserBehavior) -> Row:
    """One canary, from going out to its end."""
    case = CASES[name]
    candidate, serving = candidates[case.candidate], candidates["serving"]
    await there.deliver(None if case.by_hand else case.config)
    live_version = (
        await there.publish(candidate.made, VersionState.LIVE) if case.by_hand else None
    )  # nobody is there yet
    await there.post("rollback", version=there.stable)
    crowd = SimulatedUsers(there.settings, behavior)
    talking = asyncio.create_task(crowd.run())
    try:
        await asyncio.sleep(BEFORE)
        if live_version is not None:
            print(await there.command("deploy", str(live_version.number), "--share", str(case.share)), flush=True)
        out = live_version or await there.publish(candidate.made, VersionState.CANARY)
        since = (await there.deployment()).canary_since
        assert since is not None
        await _ended(there, f"{name}, seed {seed}", 2 * case.config.patience_seconds)
        await asyncio.sleep(AFTER)
    finally:
        crowd.stop()
        await talking
    tally, readings = crowd.stats, await read(there.db, out.id, since, case.config)
    wrong = {
        **tally.failures,
        "not done": readings.pop("not_done"),
        "misnamed": await misnamed(there.db, tally.versions),
    }
    expected = there.stable if readings["end"] == "taken back" else out.number
    return {
        "case": name,
        "seed": seed,
        "asked_share": case.share,
        "approval": candidate.approval,
        "approval_beside": serving.approval,
        **readings,
        "replies": tally.replies,
        "troubled": sum(wrong.values()) + len(tally.errors),
        "wrong": wrong,
        "troubles": tally.errors[:5],
        "head_where_it_should_be": await there.head() == expected,
    }


async def _ended(there: Harness, what: str, patience: float) -> None:
    """Until the watch has ended the canary; now and then, what `attune canary show` says."""
    began = told = time.monotonic()
    while (await there.deployment()).canary_version_id is not None:
        await asyncio.sleep(0.1)
        if time.monotonic() - told > TELL_SECONDS:
            told = time.monotonic()
            if (canary := (await there.shown())["canary"]) is not None:
                print(f"{what}: {canary['verdict']}, {canary['reason']}", flush=True)
        if time.monotonic() - began > patience:
            raise TimeoutError(f"{what} has not ended in {patience:.0f} s")


async def _learned(there: Harness, serving: Candidate) -> Row:
    """What the next update stands on, now that a canary was taken back."""
    version = await there.learn_on()
    assert version.parent_id and version.batch_id and version.adapter_path
    parent = await there.version(version.parent_id)
    behavior_versions = {(await there.version(id)).number for id in await there.learned_from(version.batch_id)}
    before, after = progress(serving.made.folder), progress(Path(version.adapter_path))
    return {"parent": parent.number, "spoke": sorted(behavior_versions), "progress": [before, after]}


async def bench(given: argparse.Namespace, seed: int, cases: Sequence[str]) -> None:
    """The cases of one seed, one after the other, on one ring; and at the end, who really spoke."""
    candidates = await asyncio.to_thread(trained_versions, given.out.parent / "canary", given.taught)
    async with harness(candidates["serving"].made, given.database, seed) as there:
        for number, name in enumerate(CASES):
            if name not in cases:
                continue
            behavior = UserBehavior(
                users=given.people,
                think_seconds=given.think,
                leave_share=given.leaves,
                seed=1 + len(CASES) * seed + number,
            )
            keep(given.out, await run(there, name, candidates, seed, behavior))
            if CASES[name].learns:
                keep(given.out, {"learned after": name, "seed": seed, **await _learned(there, candidates["serving"])})
        keep(given.out, {"attested": cases, "seed": seed, **asdict(await check_logprobs(there.db, there.settings))})


def keep(out: Path, row: Row) -> None:
    print(row, flush=True)
    with out.open("a") as file:
        file.write(json.dumps(row) + "\n")


def rows(out: Path) -> list[Row]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def table(known: Iterable[Row]) -> str:
    found = sorted(
        (row for row in known if "case" in row), key=lambda row: (list(CASES).index(row["case"]), row["seed"])
    )
    lines = ["| version | seed | " + " | ".join(COLUMNS) + " |", "|" + "---|" * (2 + len(COLUMNS))]
    for row in found:
        cells = " | ".join(shown(row) for shown in COLUMNS.values())
        lines.append(f"| {row['case']} | {row['seed']} | {cells} |")
    return "\n".join(lines)


def _seconds(value: float | None, means_something: bool = True) -> str:
    return "–" if value is None or not means_something else f"{value:.1f}"


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    given.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of who comes and what is sampled")
    given.add_argument("--taught", type=int, default=0, help="seed that the versions are taught with")
    given.add_argument("--people", type=int, default=16, help="who chat at a time; whoever leaves makes room")
    given.add_argument("--think", type=float, default=0.3, help="mean seconds between two messages")
    given.add_argument("--leaves", type=float, default=0.9, help="share that leave after a reply that is not the last")
    given.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    given.add_argument("--out", type=Path, default=Path(".attune/canary.jsonl"))
    asked = given.parse_args()
    torch.set_num_threads(1)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    print(f"{machine()}; {asked.database}, {asked.people} people at a time\n", flush=True)
    for seed in asked.seeds:
        done = {row["case"] for row in rows(asked.out) if "case" in row and row["seed"] == seed}
        if cases := [name for name in asked.cases if name not in done]:
            asyncio.run(bench(asked, seed, cases))
    known = rows(asked.out)
    print(f"\n{table(known)}\n")
    for row in known:
        if "learned after" in row:
            print(f"seed {row['seed']}, after '{row['learned after']}': the next version's parent is v{row['parent']}")
        if "attested" in row:
            print(f"seed {row['seed']}: {row['mislabelled']} of {row['replies']} replies are another version's")


if __name__ == "__main__":
    main()
