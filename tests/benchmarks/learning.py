"""What each algorithm teaches the demo model, without the service: `python -m tests.benchmarks.learning`.

Every course is 20 updates of 96 replies of the policy itself, on one core in one process. A finished run is a line in
`--out`, and is not made again, so this can be stopped and taken up; the table at the end is of all that is there.
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

from alignment.config.algorithm import (
    AlgorithmConfig,
    DAPOConfig,
    DPOConfig,
    DrGRPOConfig,
    GRPOConfig,
    KTOConfig,
    OnlineDPOConfig,
    PPOConfig,
    ReinforcePlusPlusConfig,
    RLOOConfig,
)
from alignment.config.trainer import CriticConfig, OptimConfig, TrainerConfig
from demo.offline.experiment import Experiment, ExperimentConfig
from demo.train import MODEL

UPDATES = 20
LR = 1.5e-3  # of an adapter on 2 M parameters
LAST = 5  # versions whose mean approval is told, beside the last one's
FEW_USERS = 34  # about a hundred replies
ROOMS = ("algorithm", "optim")  # of the settings: what needs no room's name before it
CURVES = ("reference_kl", "actor/ppo_kl", "actor/ppo_kl_k3", "actor/pg_clipfrac", "actor/grad_norm")
CURVES += ("critic/vf_explained_var", "rollout_corr/kl", "rollout_corr/rollout_is_eff_sample_size", "kl")


def _config(algorithm: AlgorithmConfig, *, lr: float = LR, critic: CriticConfig | None = None) -> TrainerConfig:
    return TrainerConfig(algorithm=algorithm, optim=OptimConfig(lr=lr), critic=critic or CriticConfig())


# One visible dict: a name, and how it is taught.
COURSES: dict[str, ExperimentConfig] = {
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


@dataclass(frozen=True)
class Result:
    """A whole course. `rounds`: approval of the replies that each update learned from, by whoever spoke them.

    Example: Result(name="GRPO", seed=0, lag=0, base=0.34, last=0.93, last_five=0.91, kl=0.05, length=41.0,
                    examined=363, samples=1920, refused=0, seconds_drawing=2.1, seconds_learning=3.4,
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
    examined: int
    samples: int
    refused: int
    seconds_drawing: float
    seconds_learning: float
    rounds: list[float]
    curves: dict[str, list[float]]
    settings: dict[str, Any]


@cache
def base_approval() -> float:
    """Of the version that has learned nothing: the same in every course."""
    return Experiment(MODEL, COURSES["PPO, running baseline"]).evaluate().approval


def run(name: str, course: ExperimentConfig, updates: int, tell: Callable[[str], None]) -> Result:
    study, base = Experiment(MODEL, course), base_approval()
    who = f"{name}, seed {course.seed}, lag {course.lag}"
    rounds, recent = [], []
    for _ in range(updates):
        rounds.append(done := study.run_update())
        tell(
            f"{who}: v{done.behavior_version} {done.approval:.0%}, {done.samples} samples, "
            f"drew {done.sampling_seconds:.1f} s, learned {done.training_seconds:.1f} s → v{done.version}"
            + (f" (nothing: {done.refused})" if done.refused else "")
        )
        if updates - LAST < done.version < updates:
            recent.append(study.evaluate(FEW_USERS).approval)
    last = study.evaluate()
    tell(f"{who}: {base:.1%} → {last.approval:.1%}, KL {last.kl:.3f}")
    curves: dict[str, list[float]] = defaultdict(list)
    for done in rounds:
        for metric in done.metrics.keys() & set(CURVES):
            curves[metric].append(done.metrics[metric])
    return Result(
        name=name,
        seed=course.seed,
        lag=course.lag,
        base=base,
        last=last.approval,
        last_five=fmean([*recent, last.approval]),
        kl=last.kl,
        length=last.mean_length,
        examined=last.replies,
        samples=sum(done.samples for done in rounds),
        refused=sum(done.refused is not None for done in rounds),
        seconds_drawing=median(done.sampling_seconds for done in rounds),
        seconds_learning=median(done.training_seconds for done in rounds),
        rounds=[done.approval for done in rounds],
        curves=dict(curves),
        settings=course.config.model_dump(mode="json"),
    )


def finished(out: Path) -> list[Result]:
    return [Result(**json.loads(line)) for line in out.read_text().splitlines()] if out.exists() else []


def run_all(courses: Iterable[tuple[str, ExperimentConfig]], updates: int, out: Path) -> list[Result]:
    """Make what is missing in `out`; return all that is there."""
    out.parent.mkdir(parents=True, exist_ok=True)
    known = {(result.name, result.seed, result.lag, len(result.rounds)) for result in finished(out)}
    for name, course in courses:
        if (name, course.seed, course.lag, updates) not in known:
            result = run(name, course, updates, lambda line: print(line, flush=True))
            with out.open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")
    return finished(out)


def changed(course: ExperimentConfig, changes: Iterable[str]) -> ExperimentConfig:
    """Example: changed(course, ["algorithm.beta=0.2", "optim.lr=0.003"])"""
    settings = course.config.model_dump(mode="json")
    for change in changes:
        path, _, value = change.partition("=")
        *rooms, field = path.split(".")
        place = settings
        for room in rooms:
            place = place[room]
        place[field] = json.loads(value)
    return replace(course, config=TrainerConfig.model_validate(settings))


def recipe(result: Result) -> str:
    """The settings that are not the defaults."""
    config = TrainerConfig.model_validate(result.settings)
    plain = TrainerConfig(algorithm=type(config.algorithm)(type=config.algorithm.type))
    return ", ".join(_differences(config.model_dump(), plain.model_dump()))


def _differences(settings: dict[str, Any], plain: dict[str, Any]) -> Iterator[str]:
    for name, value in settings.items():
        if isinstance(value, dict) and isinstance(plain[name], dict):
            yield from (each if name in ROOMS else f"{name}.{each}" for each in _differences(value, plain[name]))
        elif value != plain[name] and name != "seed":
            yield f"{name} {value}"


def table(results: Iterable[Result]) -> str:
    """Markdown: one line an algorithm, means over seeds and, in brackets, the least."""
    by_name: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        by_name[result.name].append(result)
    lines = [
        "| algorithm | settings beside the defaults | seeds | approval v0 → last | mean of the last five "
        "| KL to the base | tokens | samples | s to draw | s to learn |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in by_name.items():
        drawing, learning = median(r.seconds_drawing for r in runs), median(r.seconds_learning for r in runs)
        lines.append(
            f"| {name} | {recipe(runs[0])} | {len(runs)} | {runs[0].base:.0%} → {_percent(run.last for run in runs)} "
            f"| {_percent(run.last_five for run in runs)} | {fmean(run.kl for run in runs):.3f} "
            f"| {fmean(run.length for run in runs):.0f} | {fmean(run.samples for run in runs):.0f} "
            f"| {drawing:.1f} | {learning:.1f} |"
        )
    return "\n".join(lines)


def _percent(shares: Iterable[float]) -> str:
    every = list(shares)
    return f"{fmean(every):.0%}" + (f" ({min(every):.0%})" if len(every) > 1 else "")


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--courses", nargs="+", choices=COURSES, default=list(COURSES))
    given.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    given.add_argument("--updates", type=int, default=UPDATES)
    given.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="for example algorithm.beta=0.2")
    given.add_argument("--out", type=Path, default=Path(".attune/learning.jsonl"))
    asked = given.parse_args()
    torch.set_num_threads(1)
    courses = [
        (" ".join([name, *asked.set]), replace(changed(COURSES[name], [*asked.set, f"seed={seed}"]), seed=seed))
        for seed in asked.seeds
        for name in asked.courses
    ]
    results = run_all(courses, asked.updates, asked.out)
    print(f"\n{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, one thread\n\n{table(results)}")


if __name__ == "__main__":
    main()
