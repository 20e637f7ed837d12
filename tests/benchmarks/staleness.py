"""Measure how samples of older versions affect learning, by loss: `make bench-staleness`.

The behavior version, which samples the replies, is a number of updates behind the version that is trained.

"decoupled" is PPO with ratios to the recomputed log-probs of the parent version, whose tokens are weighted by the ratio
of parent to behavior probability, at most 2. "naive" takes ratios to the recorded log-probs. "CISPO" clips the weight
instead of the ratio, "KTO" needs no samples of the policy, and "mixed", the service's default, is decoupled PPO with
KTO for samples of distant versions. None stops early, so that only the losses differ. With `--service` all other
settings are the service's defaults, and a run makes `--updates` more than the lag.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from alignment.config.trainer import TrainerConfig
from tests.benchmarks.learning import LR, UPDATES, Result, change_settings, run_all
from tests.support.offline.experiment import ExperimentConfig
from tests.support.offline.service_defaults import service_run

LAGS = (0, 1, 4, 8)
LOSSES: dict[str, dict[str, Any]] = {
    "decoupled": {"type": "ppo"},
    "naive": {"type": "ppo", "proximal": "rollout", "correction": {"mode": "off"}},
    "CISPO": {"type": "ppo", "loss": "cispo"},
    "KTO": {"type": "kto"},
}


def make_run(name: str, seed: int, lag: int, *, is_service: bool) -> ExperimentConfig:
    """Return a run with this loss."""
    if is_service:
        return replace(service_run(LOSSES[name], seed), lag=lag)
    settings = LOSSES[name] | {"max_kl": None} | ({} if name == "KTO" else {"kl_coef": 0.02})
    config = TrainerConfig.model_validate({"algorithm": settings, "optim": {"lr": LR}, "seed": seed})
    return ExperimentConfig(config, lag=lag, seed=seed)


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
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=["decoupled", "naive"])
    parser.add_argument("--service", action="store_true", help="with the service's defaults")
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
                run_config = change_settings(make_run(name, seed, lag, is_service=args.service), args.set)
                label = " ".join([name, *(["(service)"] if args.service else []), *args.set])
                runs.append((label, run_config))
    print(table(run_all(runs, args.updates, args.out, after_lag=args.service)))


if __name__ == "__main__":
    main()
