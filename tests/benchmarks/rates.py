"""Measure how much the learning rate matters with the service's defaults: `python -m tests.benchmarks.rates`.

Each algorithm learns with rates from 1e-5 to 1e-2. Every update has the size and the number of passes of the service's
defaults and is scaled to its KL target. A finished run is a line in `--out` and is not repeated.
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch

from app.core.settings import Settings
from tests.benchmarks.learning import RUNS, Result, change_settings, run_all
from tests.support.offline.experiment import ExperimentConfig

RATES = (1e-5, 1e-4, 1e-3, 1e-2)
REPLIES = {"PPO, running baseline": 24, "GRPO": 48, "KTO": 24, "DPO": 48}  # in an update; a part has the same prompt
UPDATES = 16


def make_run(name: str, rate: float, seed: int) -> tuple[str, ExperimentConfig]:
    """Return the label and the configuration of one run."""
    defaults = Settings()
    changes = [f"optim.lr={rate}", f"seed={seed}", f"kl_target={defaults.update_kl_target}"]
    changes += [f"algorithm.epochs={defaults.epochs}", f"algorithm.max_kl={defaults.kl_guard}"]
    config = replace(change_settings(RUNS[name], changes), seed=seed, replies_per_update=REPLIES[name])
    return f"{name} {rate:g}", config


def table(results: Sequence[Result]) -> str:
    """Return a Markdown table of the last version's approval: the mean over the seeds and, in brackets, the lowest."""
    runs: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results:
        name, _, rate = result.name.rpartition(" ")
        runs[name, rate].append(result)
    names = list(dict.fromkeys(name for name, _ in runs))
    rates = sorted({rate for _, rate in runs}, key=float)
    lines = ["| algorithm | seeds | " + " | ".join(rates) + " | best − worst | KL to the base |"]
    lines.append("|" + "---|" * (4 + len(rates)))
    for name in names:
        means = {rate: fmean(run.last for run in runs[name, rate]) for rate in rates if runs[name, rate]}
        cells = [
            f"{means[rate]:.0%} ({min(run.last for run in runs[name, rate]):.0%})" if rate in means else "–"
            for rate in rates
        ]
        every = [run for rate in rates for run in runs[name, rate]]
        spread = 100 * (max(means.values()) - min(means.values()))
        seeds, kl = len({run.seed for run in every}), fmean(run.kl for run in every)
        lines.append(f"| {name} | {seeds} | {' | '.join(cells)} | {spread:.0f} points | {kl:.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algorithms", nargs="+", choices=REPLIES, default=list(REPLIES))
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--updates", type=int, default=UPDATES)
    parser.add_argument("--out", type=Path, default=Path(".attune/rates.jsonl"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = [make_run(name, rate, seed) for seed in args.seeds for name in args.algorithms for rate in args.rates]
    print(f"\n{table(run_all(runs, args.updates, args.out))}")


if __name__ == "__main__":
    main()
