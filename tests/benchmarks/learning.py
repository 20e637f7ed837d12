"""Measure what each algorithm learns on the demo model, without the service: `python -m tests.benchmarks.learning`.

Every run has 20 updates of 96 replies, which the policy itself samples, on one core in one process. A finished run is a
line in `--out` and is not repeated, so the benchmark can be stopped and resumed. The table at the end has every run in
`--out`. With `--service` updates have the service's defaults, 24 samples among them.
"""

import argparse
import json
import os
import platform
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from alignment.config.algorithm_choice import AlgorithmConfig
from alignment.config.policy_gradient_algorithms import (
    DAPOConfig,
    DrGRPOConfig,
    GRPOConfig,
    PPOConfig,
    ReinforcePlusPlusConfig,
    RLOOConfig,
)
from alignment.config.preference_algorithms import DPOConfig, KTOConfig, OnlineDPOConfig
from alignment.config.trainer import CriticConfig, OptimConfig, TrainerConfig
from demo.train import MODEL
from tests.benchmarks.results import append_row, read_rows
from tests.benchmarks.votes_figures import interval
from tests.support.offline.experiment import Experiment, ExperimentConfig
from tests.support.offline.service_defaults import service_run

UPDATES = 20
LR = 1.5e-3  # for an adapter of a model with 2 M parameters
LAST = 5  # the last versions, whose mean approval is reported besides that of the last one
INTERMEDIATE_USERS = 34  # simulated users of an intermediate evaluation: about a hundred replies
UNPREFIXED = ("algorithm", "optim")  # sections whose settings are printed without the name of the section
CURVES = (
    "reference_kl",
    "actor/ppo_kl",
    "actor/ppo_kl_k3",
    "actor/pg_clipfrac",
    "actor/grad_norm",
    "critic/vf_explained_var",
    "rollout_corr/kl",
    "rollout_corr/rollout_is_eff_sample_size",
    "kl",
    "guard/kl",
    "guard/kl_target",
    "actor/step_scale",
    "actor/lr_scale",
)


def _config(algorithm: AlgorithmConfig, *, lr: float = LR, critic: CriticConfig | None = None) -> TrainerConfig:
    return TrainerConfig(algorithm=algorithm, optim=OptimConfig(lr=lr), critic=critic or CriticConfig())


RUNS: dict[str, ExperimentConfig] = {
    "PPO, running baseline": ExperimentConfig(_config(PPOConfig(kl_coef=0.02))),
    "PPO, critic": ExperimentConfig(_config(PPOConfig(estimator="gae", kl_coef=0.02))),
    "GRPO": ExperimentConfig(_config(GRPOConfig(kl_coef=0.02)), replies_per_prompt=4),
    "RLOO": ExperimentConfig(_config(RLOOConfig(kl_coef=0.02)), replies_per_prompt=4),
    "REINFORCE++": ExperimentConfig(_config(ReinforcePlusPlusConfig(kl_coef=0.02))),
    "REINFORCE++ baseline": ExperimentConfig(
        _config(ReinforcePlusPlusConfig(kl_coef=0.02, baseline="group")), replies_per_prompt=4
    ),
    "KTO": ExperimentConfig(_config(KTOConfig())),
    "DPO": ExperimentConfig(_config(DPOConfig(beta=0.5)), replies_per_prompt=2, feedback="comparisons"),
    "online DPO": ExperimentConfig(_config(OnlineDPOConfig(beta=0.5)), replies_per_prompt=4),
    "Dr.GRPO": ExperimentConfig(_config(DrGRPOConfig()), replies_per_prompt=4),
    "DAPO": ExperimentConfig(_config(DAPOConfig()), replies_per_prompt=4),
}


def service_variant(run_config: ExperimentConfig) -> ExperimentConfig:
    """Return a run of the same algorithm and estimator with the service's defaults for everything else."""
    algorithm = run_config.config.algorithm
    set_fields = {"estimator", "baseline"} & algorithm.model_fields_set
    return service_run({"type": algorithm.type} | {name: getattr(algorithm, name) for name in sorted(set_fields)})


@dataclass(frozen=True)
class Result:
    """The figures of one run. `rounds` has the approval of the replies that each update was trained on.

    Example: Result(name="GRPO", seed=0, lag=0, base=0.34, last=0.93, last_five=0.91, kl=0.05, length=41.0,
                    evaluated=363, samples=1920, refused=0, sampling_seconds=2.1, training_seconds=3.4,
                    rounds=[0.4, …], curves={"reference_kl": [0.0, …]}, settings={"algorithm": …})
    """

    name: str
    seed: int
    lag: int
    base: float
    last: float
    last_five: float
    kl: float
    length: float
    evaluated: int
    samples: int
    refused: int
    sampling_seconds: float
    training_seconds: float
    rounds: list[float]
    curves: dict[str, list[float]]
    settings: dict[str, Any]


@cache
def base_approval() -> float:
    """Return the approval of the untrained version, which is the same in every run."""
    return Experiment(MODEL, RUNS["PPO, running baseline"]).evaluate().approval


def run(name: str, config: ExperimentConfig, updates: int, log: Callable[[str], None]) -> Result:
    experiment, base = Experiment(MODEL, config), base_approval()
    label = f"{name}, seed {config.seed}, lag {config.lag}"
    rounds, recent = [], []
    for _ in range(updates):
        rounds.append(done := experiment.run_update())
        log(
            f"{label}: v{done.behavior_version} {done.approval:.0%}, {done.samples} samples, "
            f"sampling {done.sampling_seconds:.1f} s, training {done.training_seconds:.1f} s → v{done.version}"
            + (f" (refused: {done.refused})" if done.refused else "")
        )
        if updates - LAST < done.version < updates:
            recent.append(experiment.evaluate(INTERMEDIATE_USERS).approval)
    last = experiment.evaluate()
    log(f"{label}: {base:.1%} → {last.approval:.1%}, KL {last.kl:.3f}")
    curves: dict[str, list[float]] = defaultdict(list)
    for done in rounds:
        for metric in done.metrics.keys() & set(CURVES):
            curves[metric].append(done.metrics[metric])
    return Result(
        name=name,
        seed=config.seed,
        lag=config.lag,
        base=base,
        last=last.approval,
        last_five=fmean([*recent, last.approval]),
        kl=last.kl,
        length=last.mean_length,
        evaluated=last.replies,
        samples=sum(done.samples for done in rounds),
        refused=sum(done.refused is not None for done in rounds),
        sampling_seconds=median(done.sampling_seconds for done in rounds),
        training_seconds=median(done.training_seconds for done in rounds),
        rounds=[done.approval for done in rounds],
        curves=dict(curves),
        settings=config.config.model_dump(mode="json"),
    )


def read_results(out: Path) -> list[Result]:
    return [Result(**row) for row in read_rows(out)]


def run_all(
    runs: Iterable[tuple[str, ExperimentConfig]], updates: int, out: Path, *, after_lag: bool = False
) -> list[Result]:
    """Make the runs that are missing in `out`, and return every result in it.

    With `after_lag` a run makes as many more updates as the version that samples is behind.
    """
    finished = {(result.name, result.seed, result.lag, len(result.rounds)) for result in read_results(out)}
    for name, config in runs:
        count = updates + config.lag if after_lag else updates
        if (name, config.seed, config.lag, count) not in finished:
            result = run(name, config, count, lambda line: print(line, flush=True))
            append_row(out, asdict(result))
    return read_results(out)


def change_settings(config: ExperimentConfig, changes: Iterable[str]) -> ExperimentConfig:
    """Return the config with some settings changed.

    Example: change_settings(config, ["algorithm.beta=0.2", "optim.lr=0.003"])
    """
    settings = config.config.model_dump(mode="json")
    for change in changes:
        path, _, value = change.partition("=")
        *sections, field = path.split(".")
        target = settings
        for section in sections:
            target = target[section]
        target[field] = json.loads(value)
    return replace(config, config=TrainerConfig.model_validate(settings))


def changed_settings(result: Result) -> str:
    """Return the settings that differ from the defaults."""
    config = TrainerConfig.model_validate(result.settings)
    defaults = TrainerConfig.model_validate({"algorithm": {"type": config.algorithm.type}})
    return ", ".join(_differences(config.model_dump(), defaults.model_dump()))


def _differences(settings: dict[str, Any], defaults: dict[str, Any]) -> Iterator[str]:
    for name, value in settings.items():
        if isinstance(value, dict) and isinstance(defaults[name], dict):
            yield from (
                each if name in UNPREFIXED else f"{name}.{each}" for each in _differences(value, defaults[name])
            )
        elif value != defaults[name] and name != "seed":
            yield f"{name} {value}"


def table(results: Iterable[Result]) -> str:
    """Return a Markdown table with one row per algorithm: means over the seeds, approval with its 95 % interval."""
    by_name: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        by_name[result.name].append(result)
    lines = [
        "| algorithm | settings that differ from the defaults | seeds | approval v0 → last | mean of the last five "
        "| KL to the base | tokens | samples | s of sampling | s of training |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in by_name.items():
        sampling, training = median(r.sampling_seconds for r in runs), median(r.training_seconds for r in runs)
        lines.append(
            f"| {name} | {changed_settings(runs[0])} | {len(runs)} "
            f"| {runs[0].base:.0%} → {percent(run.last for run in runs)} "
            f"| {percent(run.last_five for run in runs)} | {fmean(run.kl for run in runs):.3f} "
            f"| {fmean(run.length for run in runs):.0f} | {fmean(run.samples for run in runs):.0f} "
            f"| {sampling:.1f} | {training:.1f} |"
        )
    return "\n".join(lines)


def percent(shares: Iterable[float]) -> str:
    """Return the mean in percent, with its 95 % interval where there are several values. Example: "91 ± 3 %"."""
    return f"{interval([100 * share for share in shares])} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--updates", type=int, default=UPDATES)
    parser.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="for example algorithm.beta=0.2")
    parser.add_argument("--service", action="store_true", help="with the service's defaults")
    parser.add_argument("--out", type=Path, default=Path("docs/measurements/learning.jsonl"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = []
    for seed in args.seeds:
        for name in args.runs:
            config = service_variant(RUNS[name]) if args.service else RUNS[name]
            label = " ".join([name, *(["(service)"] if args.service else []), *args.set])
            runs.append((label, replace(change_settings(config, [*args.set, f"seed={seed}"]), seed=seed)))
    results = run_all(runs, args.updates, args.out)
    print(f"\n{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, one thread\n\n{table(results)}")


if __name__ == "__main__":
    main()
