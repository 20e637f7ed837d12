"""Measure whether samples of older versions make any version worse: `python -m tests.benchmarks.lags`.

The service's updates on the demo model, 24 samples each. The version that samples is `--lags` updates behind the one
that is trained, or version 0 until there are so many. After each update the new version is evaluated on other users.
The largest fall between two versions of a run is measured again on users that played no part in finding it, so that it
is not the largest of many sampling errors. A finished run is a line in `--out` and is not repeated; the tables at the
end have every run in it.
"""

import argparse
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from demo.train import MODEL
from tests.benchmarks.learning import change_settings, percent
from tests.benchmarks.results import append_row, read_rows
from tests.benchmarks.votes_figures import interval
from tests.support.offline.chats import EVALUATION_SEED
from tests.support.offline.experiment import Experiment, copy_actor
from tests.support.offline.service_defaults import service_run

ALGORITHMS: dict[str, dict[str, Any]] = {"PPO": {"type": "ppo"}, "KTO": {"type": "kto"}, "GRPO": {"type": "grpo"}}
LAGS = (0, 1, 4, 8, 16)
UPDATES = 24
HELD_OUT = 64  # replies without a vote that the trainer is given, as in the service
USERS = 32  # of an evaluation after an update: about 95 replies
FALL_USERS = 128  # of the second measurement of a fall: about 360 replies
EVERY = 4  # updates between two columns of the summary
BOUND = 10.0  # points; no version should fall further
CURVES = (
    "guard/kl",
    "actor/fitted_kl",
    "actor/step_scale",
    "actor/lr",
    "critic/baseline",
    "training/samples_returned",
    "rollout_corr/rollout_is_eff_sample_size",
)


class Fall(NamedTuple):
    """A version that was liked less than an earlier one, both measured on the same new users.

    Example: Fall(earlier=4, later=6, before=0.81, after=0.74, replies=540)
    """

    earlier: int
    later: int
    before: float
    after: float
    replies: int

    @property
    def points(self) -> float:
        return 100 * (self.before - self.after)

    @property
    def error(self) -> float:
        """Return the standard error of `points`, as if the two samples of replies were independent."""
        variance = sum(share * (1 - share) for share in (self.before, self.after)) / self.replies
        return 100 * math.sqrt(variance)


@dataclass(frozen=True)
class Result:
    """One run. `approvals` are those of the versions, from 0 on; `fall` is a `Fall`; `curves` are metrics by update."""

    name: str
    label: str
    seed: int
    lag: int
    updates: int
    approvals: list[float]
    fall: list[float]
    refused: int
    curves: dict[str, list[float]]

    @property
    def measured_fall(self) -> Fall:
        earlier, later, before, after, replies = self.fall
        return Fall(int(earlier), int(later), before, after, int(replies))


def largest_fall(approvals: Sequence[float]) -> tuple[int, int]:
    """Return the earlier and the later version between which approval falls most.

    Example: largest_fall([0.3, 0.8, 0.6, 0.7]) -> (1, 2)
    """
    pairs = ((i, j) for j in range(1, len(approvals)) for i in range(j))
    return max(pairs, key=lambda pair: approvals[pair[0]] - approvals[pair[1]])


def run(name: str, label: str, seed: int, lag: int, updates: int, changes: Sequence[str]) -> Result:
    config = replace(service_run(ALGORITHMS[name], seed), lag=lag)
    experiment = Experiment(MODEL, change_settings(config, changes))
    adapters, approvals = [copy_actor(experiment.trainer)], [experiment.evaluate_newest(USERS)[0]]
    curves, refused = defaultdict[str, list[float]](list), 0
    for _ in range(updates):
        result = experiment.run_update(HELD_OUT)
        refused += result.refused is not None
        for metric in CURVES:
            curves[metric].append(result.metrics.get(metric, math.nan))
        adapters.append(copy_actor(experiment.trainer))
        approvals.append(approvals[-1] if result.refused else experiment.evaluate_newest(USERS)[0])
        print(
            f"{name} {label} seed {seed} lag {lag}: v{result.version} {approvals[-1]:.0%}, votes up "
            f"{result.approval:.0%}" + "".join(f", {m.split('/')[1]} {v[-1]:.2g}" for m, v in curves.items()),
            flush=True,
        )

    pair = largest_fall(approvals)
    before, after = (experiment.evaluate_adapter(adapters[n], FALL_USERS, EVALUATION_SEED + 1) for n in pair)
    fall = Fall(*pair, before[0], after[0], after[1])
    return Result(name, label, seed, lag, updates, approvals, list(fall), refused, dict(curves))


def table(results: Iterable[Result]) -> str:
    """Return a Markdown table with the largest fall of each run, measured again, with its standard error."""
    lines = [
        "| algorithm | updates behind | seed | updates | last three versions | largest fall, measured again |",
        "|---|---|---|---|---|---|",
    ]
    for one in sorted(results, key=lambda r: (r.name, r.label, r.lag, r.seed)):
        fall = one.measured_fall
        lines.append(
            f"| {f'{one.name} {one.label}'.strip()} | {one.lag} | {one.seed} | {one.updates} "
            f"| {fmean(one.approvals[-3:]):.0%} | {fall.points:+.0f} ± {fall.error:.0f} "
            f"(v{fall.earlier} {fall.before:.0%}, v{fall.later} {fall.after:.0%}) |"
        )
    return "\n".join(lines)


def summary(results: Iterable[Result]) -> str:
    """Return Markdown tables of means over the seeds, one for each number of updates, with 95 % intervals.

    The last columns have the largest fall of any seed, and the number of seeds with a fall above `BOUND` and with one
    that is above it by more than two standard errors.
    """
    groups: dict[int, dict[tuple[str, str, int], list[Result]]] = defaultdict(lambda: defaultdict(list))
    for one in sorted(results, key=lambda r: (r.name, r.label, r.lag, r.seed)):
        groups[one.updates][one.name, one.label, one.lag].append(one)
    return "\n\n".join(_summary(groups[updates], updates) for updates in sorted(groups))


def _summary(groups: Mapping[tuple[str, str, int], Sequence[Result]], updates: int) -> str:
    versions = range(EVERY, updates + 1, EVERY)
    lines = [
        f"| {updates} updates | updates behind | seeds | {' | '.join(f'v{version}' for version in versions)} "
        "| last three versions | lowest seed | mean of the largest falls | the largest one "
        f"| above {BOUND:.0f} points | by two errors |",
        "|" + "---|" * (9 + len(versions)),
    ]
    for (name, label, lag), runs in groups.items():
        last, falls = [fmean(run.approvals[-3:]) for run in runs], [run.measured_fall for run in runs]
        largest = max(falls, key=lambda fall: fall.points)
        cells = [
            f"{name} {label}".strip(),
            str(lag),
            ", ".join(str(run.seed) for run in runs),
            *(f"{fmean(run.approvals[version] for run in runs):.0%}" for version in versions),
            percent(last),
            f"{min(last):.0%}",
            interval([fall.points for fall in falls]),
            f"{largest.points:+.0f} ± {largest.error:.0f}",
            str(sum(fall.points > BOUND for fall in falls)),
            str(sum(fall.points - 2 * fall.error > BOUND for fall in falls)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--lags", nargs="+", type=int, default=list(LAGS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[41, 57])
    parser.add_argument("--updates", type=int, default=UPDATES)
    parser.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="for example algorithm.whiten=full")
    parser.add_argument("--label", default="", help="names runs of another commit or with other settings")
    parser.add_argument("--out", type=Path, default=Path("docs/measurements/lags.jsonl"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    for seed in args.seeds:
        for name in args.algorithms:
            for lag in args.lags:
                key = (name, args.label, seed, lag, args.updates)
                finished = [Result(**row) for row in read_rows(args.out)]
                if key not in {(r.name, r.label, r.seed, r.lag, r.updates) for r in finished}:
                    append_row(args.out, asdict(run(*key, args.set)))
    results = [Result(**row) for row in read_rows(args.out)]
    print(f"\n{table(results)}\n\n{summary(results)}")


if __name__ == "__main__":
    main()
