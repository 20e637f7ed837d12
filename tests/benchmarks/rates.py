"""Measure how much the learning rate matters with the service's defaults: `python -m tests.benchmarks.rates`.

Each algorithm learns with rates from 1e-5 to 1e-2; all other settings are the service's defaults. A finished run is a
line in `--out` and is not repeated.
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, geometric_mean

import torch

from alignment.config.trainer import OptimConfig
from tests.benchmarks.learning import Result, percent, run_all
from tests.support.offline.experiment import ExperimentConfig
from tests.support.offline.service_defaults import service_run

RATES = (1e-5, 1e-4, 1e-3, 1e-2)
ALGORITHMS = {"PPO": "ppo", "GRPO": "grpo", "KTO": "kto", "DPO": "dpo"}
UPDATES = 16
ADAPTED = 4  # updates after which the adapted rate is reported, besides the last one


def make_run(name: str, rate: float, seed: int) -> tuple[str, ExperimentConfig]:
    """Return the label and the configuration of one run."""
    return f"{name} {rate:g}", service_run({"type": ALGORITHMS[name]}, seed, optim=OptimConfig(lr=rate))


def table(results: Sequence[Result]) -> str:
    """Return a Markdown table of the approval of the last version and, in brackets, of the last five.

    Both are means over the seeds, with a 95 % interval.
    """
    runs, names, rates = _group(results)
    lines = ["| algorithm | seeds | " + " | ".join(rates) + " | best − worst | KL to the base |"]
    lines.append("|" + "---|" * (4 + len(rates)))
    for name in names:
        means = {rate: fmean(run.last for run in runs[name, rate]) for rate in rates if runs[name, rate]}
        cells = [
            f"{percent(run.last for run in runs[name, rate])} ({percent(run.last_five for run in runs[name, rate])})"
            if rate in means
            else "–"
            for rate in rates
        ]
        every = [run for rate in rates for run in runs[name, rate]]
        spread = 100 * (max(means.values()) - min(means.values()))
        counts = {len(runs[name, rate]) for rate in means}
        seeds, kl = " to ".join(str(count) for count in sorted({min(counts), max(counts)})), fmean(r.kl for r in every)
        lines.append(f"| {name} | {seeds} | {' | '.join(cells)} | {spread:.0f} points | {kl:.3f} |")
    return "\n".join(lines)


def adapted_table(results: Sequence[Result]) -> str:
    """Return a Markdown table of the adapted learning rates: geometric means over the seeds."""
    runs, names, rates = _group(results)
    lines = ["| algorithm | rate after | " + " | ".join(rates) + " |", "|" + "---|" * (2 + len(rates))]
    for name in names:
        for updates in (ADAPTED, UPDATES):
            cells = [_adapted(runs[name, rate], float(rate), updates) for rate in rates]
            lines.append(f"| {name} | {updates} updates | {' | '.join(cells)} |")
    return "\n".join(lines)


def _group(results: Sequence[Result]) -> tuple[dict[tuple[str, str], list[Result]], list[str], list[str]]:
    """Return the runs by algorithm and rate, the algorithms, and the rates in ascending order."""
    runs: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results:
        name, _, rate = result.name.rpartition(" ")
        runs[name, rate].append(result)
    return runs, list(dict.fromkeys(name for name, _ in runs)), sorted({rate for _, rate in runs}, key=float)


def _adapted(runs: Sequence[Result], rate: float, updates: int) -> str:
    scales = [run.curves.get("actor/lr_scale", [])[:updates][-1:] for run in runs]
    return f"{geometric_mean([rate * scale for [scale] in scales]):.1e}" if scales and all(scales) else "–"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--updates", type=int, default=UPDATES)
    parser.add_argument("--out", type=Path, default=Path("docs/measurements/rates.jsonl"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = [make_run(name, rate, seed) for seed in args.seeds for name in args.algorithms for rate in args.rates]
    results = run_all(runs, args.updates, args.out)
    print(f"\n{table(results)}\n\n{adapted_table(results)}")


if __name__ == "__main__":
    main()
