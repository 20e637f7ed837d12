"""Measure what late votes cost, on the demo model with a simulated clock: `python -m tests.benchmarks.late_votes`.

A minute passes between two updates. In each minute the newest version answers `--replies` prompts, and every reply gets
a vote after a delay: "prompt" votes come before the next update; "late" ones after a log-normal delay of which half is
below 2 minutes and nine tenths below an hour. An update takes all votes that have come; its settings are the service's
defaults. "1 version" drops votes that are more than one update behind.
"""

import argparse
import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import torch

from alignment.config.trainer import TrainerConfig
from alignment.types import Sample
from demo.train import MODEL
from tests.benchmarks.results import append_row, read_rows
from tests.support.offline.experiment import Experiment, ExperimentConfig
from tests.support.offline.service_defaults import service_config

MEDIAN_MINUTES, NINE_TENTHS_MINUTES = 2.0, 60.0
NINE_TENTHS = 1.2816  # standard deviations
LAST = 3  # evaluations whose mean is reported
EVALUATION_USERS = 64


@dataclass(frozen=True)
class Strategy:
    """How votes are learned from: settings of the algorithm. `max_lag`: older samples are dropped."""

    algorithm: dict[str, Any]
    max_lag: int | None = None


STRATEGIES = {
    "PPO": Strategy({"type": "ppo"}),
    "CISPO": Strategy({"type": "ppo", "loss": "cispo"}),
    "KTO": Strategy({"type": "kto"}),
    "1 version": Strategy({"type": "ppo"}, max_lag=1),
}


@dataclass(frozen=True)
class Result:
    """One run. `arrived`: votes that came before its end; `lag`: mean versions behind of the samples learned from."""

    strategy: str
    delays: str
    seed: int
    votes: int
    arrived: int
    learned: int
    approval: float
    curve: list[float]
    lag: float


def make_config(strategy: Strategy, seed: int) -> TrainerConfig:
    return service_config(strategy.algorithm, seed)


def run(name: str, delays: str, seed: int, minutes: int, replies: int, log: Callable[[str], None]) -> Result:
    strategy = STRATEGIES[name]
    config = make_config(strategy, seed)
    experiment = Experiment(MODEL, ExperimentConfig(config, replies_per_update=replies, seed=seed))
    rng, number = Random(f"delays {seed}"), 0
    waiting: list[tuple[float, int, Sample]] = []  # by the minute in which the vote comes
    carried_over: list[Sample] = []
    lags, curve = [], []
    arrived = num_learned = 0
    for minute in range(minutes):
        for sample in experiment.collect_votes().samples:
            number += 1
            delay = 0.0 if delays == "prompt" else draw_delay(rng)
            heapq.heappush(waiting, (minute + delay, number, sample))
        due: list[Sample] = []
        while waiting and waiting[0][0] < minute + 1:
            due.append(heapq.heappop(waiting)[-1])
        arrived += len(due)
        usable = [s for s in due if strategy.max_lag is None or experiment.version - s.version <= strategy.max_lag]
        batch = [*carried_over, *usable]
        if len({sample.reward for sample in batch}) < 2:
            carried_over = batch  # the next batch has contrast, perhaps
        else:
            lags += [experiment.version - sample.version for sample in batch]
            _, refused = experiment.train(batch)
            num_learned += len(batch) if refused is None else 0
            carried_over = []
        if (minute >= minutes - 5 * LAST and (minutes - minute) % 5 == 1) or minute % 20 == 19:
            curve.append(experiment.evaluate(EVALUATION_USERS).approval)
            log(f"{name}, {delays}, seed {seed}, minute {minute + 1}: {curve[-1]:.0%}, {num_learned} learned from")
    return Result(
        name,
        delays,
        seed,
        number,
        arrived,
        num_learned,
        fmean(curve[-LAST:]),
        curve,
        fmean(lags or [0.0]),
    )


def draw_delay(rng: Random) -> float:
    """Return the delay of a vote in minutes."""
    mu = math.log(MEDIAN_MINUTES)
    return math.exp(rng.gauss(mu, (math.log(NINE_TENTHS_MINUTES) - mu) / NINE_TENTHS))


def table(results: Sequence[Result]) -> str:
    """Return a Markdown table with one row per strategy and kind of delay: means over the seeds."""
    groups: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results:
        groups[result.strategy, result.delays].append(result)
    lines = [
        "| votes | loss | seeds | approval | lowest seed | votes that came | learned from | versions behind |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (name, delays), runs in groups.items():
        lines.append(
            f"| {delays} | {name} | {len(runs)} | {fmean(run.approval for run in runs):.1%} "
            f"| {min(run.approval for run in runs):.1%} | {fmean(run.arrived for run in runs):.0f} "
            f"| {fmean(run.learned / run.arrived for run in runs):.1%} | {fmean(run.lag for run in runs):.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--delays", nargs="+", choices=("prompt", "late"), default=["prompt", "late"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--minutes", type=int, default=60)
    parser.add_argument("--replies", type=int, default=16)
    parser.add_argument("--out", type=Path, default=Path("docs/measurements/late_votes.jsonl"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = [Result(**row) for row in read_rows(args.out)]
    finished = {(result.strategy, result.delays, result.seed) for result in results}
    for seed in args.seeds:
        for name in args.strategies:
            for delays in args.delays:
                if (name, delays, seed) not in finished:
                    result = run(name, delays, seed, args.minutes, args.replies, lambda line: print(line, flush=True))
                    results.append(result)
                    append_row(args.out, asdict(result))
    print(f"\n{table(results)}")


if __name__ == "__main__":
    main()
