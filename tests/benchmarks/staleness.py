"""Measure how samples of older versions affect learning, by loss: `make bench-staleness`.

The behavior version, which samples the replies, is a number of updates behind the version that is trained.

"decoupled" is PPO with ratios to the recomputed log-probs of the parent version, whose tokens are weighted by the ratio
of parent to behavior probability, at most 2. "naive" takes ratios to the recorded log-probs. "CISPO" clips the weight
instead of the ratio, "KTO" needs no samples of the policy, and "mixed", the service's default, is decoupled PPO with
KTO for samples of distant versions. None stops early, so that only the losses differ. With `--service` updates have the
size, the passes and the KL target of the service's defaults, and a run makes `--updates` more than the lag.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch

from alignment.config.algorithm import AlgorithmConfig, CorrectionConfig, KTOConfig, PPOConfig
from alignment.config.trainer import OptimConfig, TrainerConfig
from app.core.settings import Settings
from app.core.settings.root import DEFAULT_EPOCHS
from tests.benchmarks.learning import LR, UPDATES, Result, change_settings, run_all
from tests.support.offline.experiment import ExperimentConfig

LAGS = (0, 1, 4, 8)
LOSSES: dict[str, AlgorithmConfig] = {
    "decoupled": PPOConfig(kl_coef=0.02, max_kl=None),
    "naive": PPOConfig(kl_coef=0.02, max_kl=None, proximal="rollout", correction=CorrectionConfig(mode="off")),
    "CISPO": PPOConfig(kl_coef=0.02, max_kl=None, loss="cispo"),
    "KTO": KTOConfig(max_kl=None),
    "mixed": PPOConfig(kl_coef=0.02, max_kl=None),
}


def make_config(name: str, seed: int, is_service: bool) -> TrainerConfig:
    config = TrainerConfig(algorithm=LOSSES[name], optim=OptimConfig(lr=LR), seed=seed, max_mismatch=1e9)
    if name != "mixed":
        config = config.model_copy(update={"late": None})
    if is_service:
        defaults = Settings()
        algorithm = config.algorithm.model_copy(update={"epochs": DEFAULT_EPOCHS, "max_kl": defaults.trainer.kl_guard})
        config = config.model_copy(update={"algorithm": algorithm, "kl_target": defaults.trainer.update_kl_target})
    return config


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
    parser.add_argument("--service", action="store_true", help="updates as by the service's defaults")
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
                run_config = ExperimentConfig(make_config(name, seed, args.service), lag=lag, seed=seed)
                if args.service:
                    run_config = replace(run_config, replies_per_update=Settings().trainer.batch_size)
                run_config = change_settings(run_config, args.set)
                label = " ".join([name, *(["(service)"] if args.service else []), *args.set])
                runs.append((label, run_config))
    print(table(run_all(runs, args.updates, args.out, after_lag=args.service)))


if __name__ == "__main__":
    main()
