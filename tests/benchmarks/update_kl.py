"""Measure whether the KL that an update is scaled by is the update's KL: `python -m tests.benchmarks.update_kl`.

The service's updates on the demo model, 24 votes each. After each one its KL is measured on replies of the parent that
the trainer was not given ("fresh"), exactly and with k3. A finished run is a line in `--out` and is not repeated; the
table at the end has every run in it.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import correlation, fmean, median

import torch
from torch import Tensor

from alignment.data.micro_batches import ScoredSequence, make_model_inputs
from alignment.functional import kl_estimate
from alignment.models.policy_model import PolicyModel
from alignment.types import Sample
from app.core.settings import Settings
from demo.train import MODEL
from tests.benchmarks.learning import change_settings, percent
from tests.benchmarks.results import append_row, read_rows
from tests.support.offline.experiment import Experiment
from tests.support.offline.service_defaults import service_run

ALGORITHMS = {"PPO": "ppo", "KTO": "kto"}
UPDATES = 12
HELD_OUT = 64  # replies that the trainer is given, as in the service
FRESH = 32
USERS = 96


@dataclass(frozen=True)
class Result:
    """The figures of one run, one of each list an update that was not refused. Seconds are CPU time.

    Example: Result(name="PPO", label="", seed=41, target=0.01, held_out=64, updates=12, fitted=[0.005, …], guard=[…],
                    fresh=[…], fresh_k3=[…], scale=[…], lr=[…], seconds=[…], rounds=[0.4, …], last=0.86)
    """

    name: str
    label: str
    seed: int
    target: float
    held_out: int
    updates: int
    fitted: list[float]
    guard: list[float]
    fresh: list[float]
    fresh_k3: list[float]
    scale: list[float]
    lr: list[float]
    seconds: list[float]
    rounds: list[float]
    last: float


@torch.no_grad()
def log_distributions(policy: PolicyModel, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """Return the log-probs of the whole vocabulary at each output token, and of the tokens.  → [N, V], [N]"""
    inputs = make_model_inputs([ScoredSequence.from_sample(sample) for sample in samples], policy.device, "off")
    with policy.active_role.acting_as("actor"):
        hidden_ND = policy.base_lm.hidden_states(inputs)
    logits_NV = policy.base_lm.model.get_output_embeddings()(hidden_ND).float()
    logprobs_NV = (logits_NV / inputs.temperatures_N[:, None]).log_softmax(-1)
    return logprobs_NV, logprobs_NV.gather(1, inputs.targets_N[:, None])[:, 0]


def run(
    name: str, label: str, seed: int, target: float, held_out: int, updates: int, changes: Sequence[str] = ()
) -> Result:
    """Train and measure. `changes` are settings of the trainer, as `change_settings` takes them."""
    config = service_run({"type": ALGORITHMS[name]}, seed, kl_target=target)
    experiment = Experiment(MODEL, change_settings(config, changes))
    rows, rounds = defaultdict[str, list[float]](list), []
    for _ in range(updates):
        rated = experiment.collect_votes()
        rounds.append(rated.approval)
        unrated = experiment.collect_unrated(HELD_OUT + FRESH)
        fresh = unrated[HELD_OUT:]
        before_NV, before_N = log_distributions(experiment.trainer.policy, fresh)
        started = time.process_time()
        metrics, refused = experiment.train(rated.samples, unrated[:held_out])
        if refused:
            continue
        rows["seconds"].append(time.process_time() - started)
        after_NV, after_N = log_distributions(experiment.trainer.policy, fresh)
        rows["fitted"].append(metrics["actor/fitted_kl"])
        rows["guard"].append(metrics["guard/kl"])
        rows["fresh"].append(float((before_NV.exp() * (before_NV - after_NV)).sum(-1).mean()))
        rows["fresh_k3"].append(float(kl_estimate(before_N, after_N, "k3").mean()))
        rows["scale"].append(metrics["actor/step_scale"])
        rows["lr"].append(experiment.trainer.optimizers["actor"].lr)
        print(
            f"{name} {label} {seed} {target:g}: " + ", ".join(f"{k} {v[-1]:.2g}" for k, v in rows.items()), flush=True
        )
    last = experiment.evaluate(USERS).approval
    return Result(name, label, seed, target, held_out, updates, **rows, rounds=rounds, last=last)


def table(results: Iterable[Result]) -> str:
    """Return a Markdown table with a row for each algorithm, label and target."""
    groups: dict[tuple[object, ...], list[Result]] = defaultdict(list)
    for result in results:
        groups[result.name, result.label, result.target, result.held_out].append(result)
    lines = [
        "| | target | held out | updates | KL that it was scaled by | fresh KL | largest fresh KL "
        "| fresh below a tenth | correlation | scale | CPU s an update | approval |",
        "|" + "---|" * 12,
    ]
    for (name, label, target, held_out), runs in groups.items():
        fitted, fresh = ([value for r in runs for value in getattr(r, field)] for field in ("fitted", "fresh"))
        scales = [value for r in runs for value in r.scale]
        agreement = f"{correlation(fitted, fresh):.2f}" if len(fitted) > 2 else "–"
        below = sum(new < old / 10 for old, new in zip(fitted, fresh, strict=True))
        lines.append(
            f"| {f'{name} {label}'.strip()} | {target} | {held_out} | {len(fitted)} | {fmean(fitted):.4f} "
            f"| mean {fmean(fresh):.4f}, median {median(fresh):.4f} | {max(fresh):.4f} | {below} "
            f"| {agreement} | {min(scales):.2f}–{max(scales):.1f} "
            f"| {median(value for r in runs for value in r.seconds):.1f} | {percent(r.last for r in runs)} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[41, 57])
    parser.add_argument("--targets", nargs="+", type=float, default=[Settings().trainer.update_kl_target])
    parser.add_argument("--held-out", type=int, default=HELD_OUT, help="replies that the trainer is given; 0: none")
    parser.add_argument("--updates", type=int, default=UPDATES)
    parser.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="for example optim.lr=0.01")
    parser.add_argument("--label", default="", help="names runs of another commit or with other settings")
    parser.add_argument("--out", type=Path, default=Path("docs/measurements/update_kl.jsonl"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    for target in args.targets:
        for name in args.algorithms:
            for seed in args.seeds:
                key = (name, args.label, seed, target, args.held_out, args.updates)
                finished = [Result(**row) for row in read_rows(args.out)]
                if key not in {(r.name, r.label, r.seed, r.target, r.held_out, r.updates) for r in finished}:
                    append_row(args.out, asdict(run(*key, args.set)))
    print(f"\n{table(Result(**row) for row in read_rows(args.out))}")


if __name__ == "__main__":
    main()
