"""What samples of older versions do to PPO, corrected and not: `python -m tests.benchmarks.staleness`.

The version that speaks is 0, 1, 4 or 8 updates behind the one that is taught. "decoupled" takes ratios to the parent,
scored anew, and weighs tokens by parent / speaker, at most 2; "naive" takes ratios to the recorded log-probs. Neither
stops early, so that it is the loss alone that is compared.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

import torch

from alignment.config.algorithm import CorrectionConfig, PPOConfig
from alignment.config.trainer import OptimConfig, TrainerConfig
from demo.offline.experiment import ExperimentConfig
from tests.benchmarks.learning import LR, UPDATES, Result, changed, run_all

LAGS = (0, 1, 4, 8)
LOSSES = {
    "decoupled": PPOConfig(kl_coef=0.02, max_kl=None),
    "naive": PPOConfig(kl_coef=0.02, max_kl=None, proximal="rollout", correction=CorrectionConfig(mode="off")),
}


def table(results: Iterable[Result]) -> str:
    """Markdown: one line a lag, the means over seeds side by side."""
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
    """The first version that was heard to be liked so much; versions that spoke several times count each time."""
    over = (max(0, at - run.lag) for at, approval in enumerate(run.rounds) if approval > bound)
    return next((f"v{version}" for version in over), "never")


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES))
    given.add_argument("--lags", nargs="+", type=int, default=list(LAGS))
    given.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    given.add_argument("--updates", type=int, default=UPDATES)
    given.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="for example algorithm.epochs=2")
    given.add_argument("--out", type=Path, default=Path(".attune/staleness.jsonl"))
    asked = given.parse_args()
    torch.set_num_threads(1)
    courses = []
    for seed in asked.seeds:
        for lag in asked.lags:
            for name in asked.losses:
                config = TrainerConfig(algorithm=LOSSES[name], optim=OptimConfig(lr=LR), seed=seed)
                course = changed(ExperimentConfig(config, lag=lag, seed=seed), asked.set)
                courses.append((" ".join([name, *asked.set]), course))
    print(table(run_all(courses, asked.updates, asked.out)))


if __name__ == "__main__":
    main()
