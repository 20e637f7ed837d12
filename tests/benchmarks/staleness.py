"""Measure how samples of older versions affect PPO, corrected or not: `python -m tests.benchmarks.staleness`.

The behavior version, which samples the replies, is 0, 1, 4 or 8 updates behind the version that is trained. "decoupled"
takes ratios to the recomputed log-probs of the parent version, and weights each token by the ratio of parent to
behavior probability, at most 2. "naive" takes ratios to the recorded log-probs. Neither stops early, so that only the
losses differ.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

import torch

from alignment.config.algorithm import CorrectionConfig, PPOConfig
from alignment.config.trainer import OptimConfig, TrainerConfig
from tests.benchmarks.learning import LR, UPDATES, Result, change_settings, run_all
from tests.support.offline.experiment import ExperimentConfig

LAGS = (0, 1, 4, 8)
LOSSES = {
    "decoupled": PPOConfig(kl_coef=0.02, max_kl=None),
    "naive": PPOConfig(kl_coef=0.02, max_kl=None, proximal="rollout", correction=CorrectionConfig(mode="off")),
}


def table(results: Iterable[Result]) -> str:
    """Return a Markdown table with one row per lag, and the means over the seeds for each loss."""
    runs: dict[tuple[str, int], list[Result]] = defaultdict(list)
    for result in results:
        runs[result.name, result.lag].append(result)
    names = dict.fromkeys(name for name, _ in runs)
    lines = ["| updates behind | " + " | ".join(f"{n}: v20 | last five | KL | first over 80 %" for n in names) + " |"]
    lines.append("|" + "---|" * (1 + 4 * len(names)))
    for lag in sorted({lag for _, lag in runs}):
        cells = [cell for name in names for cell in _cells(runs[name, lag])]
        lines.append(f"| {lag} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cells(runs: list[Result]) -> list[str]:
    if not runs:
        return ["–"] * 4
    return [
        f"{fmean(run.last for run in runs):.0%}",
        f"{fmean(run.last_five for run in runs):.0%}",
        f"{fmean(run.kl for run in runs):.3f}",
        ", ".join(_first_over(run, 0.8) for run in runs),
    ]


def _first_over(run: Result, bound: float) -> str:
    """Return the first behavior version whose replies have an approval above `bound`, or "never"."""
    over = (max(0, at - run.lag) for at, approval in enumerate(run.rounds) if approval > bound)
    return next((f"v{version}" for version in over), "never")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES))
    parser.add_argument("--lags", nargs="+", type=int, default=list(LAGS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--updates", type=int, default=UPDATES)
    parser.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="for example algorithm.epochs=2")
    parser.add_argument("--out", type=Path, default=Path(".attune/staleness.jsonl"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = []
    for seed in args.seeds:
        for lag in args.lags:
            for name in args.losses:
                config = TrainerConfig(algorithm=LOSSES[name], optim=OptimConfig(lr=LR), seed=seed)
                run_config = change_settings(ExperimentConfig(config, lag=lag, seed=seed), args.set)
                runs.append((" ".join([name, *args.set]), run_config))
    print(table(run_all(runs, args.updates, args.out)))


if __name__ == "__main__":
    main()
