"""Measure how a few malicious raters shift the demo model, with and without protections.

Start with `python -m tests.benchmarks.poisoning`. Every run has 20 updates of 96 replies on one core. A finished run is
a line in `--out` and is not repeated, so the benchmark can be stopped and resumed. The table at the end has every run
in `--out`.
"""

import argparse
import math
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from alignment.config.policy_gradient_algorithms import PPOConfig
from tests.benchmarks.learning import _config
from tests.benchmarks.results import append_row, read_rows
from tests.support.offline.poisoning import Attack, PoisoningConfig, PoisoningExperiment

UPDATES = 20
EVALUATION_USERS = 256  # about 720 replies: a share of a third has a standard error of 1.7 points
LAST = 5  # the last updates, whose replies are counted besides those of the evaluation
PPO = PoisoningConfig(_config(PPOConfig(kl_coef=0.02)))
ATTACKS: dict[str, Attack] = {
    "nobody": Attack(),
    "5 loud": Attack(5, 4),
    "one account": Attack(1, 96),  # half of all votes
    "3 loud": Attack(3, 4),
    "1 loud": Attack(1, 4),
    "5 quiet": Attack(5),
    "3 quiet": Attack(3),
    "1 quiet": Attack(1),
}
PROTECTIONS: dict[str, dict[str, bool]] = {
    "off": {"protected": False},
    "on": {"protected": True, "trust_weighted_caps": True},
    "caps alone": {"protected": True, "quarantines": False},
}
Result = dict[str, Any]


def run(attack: str, protections: str, seed: int, updates: int, evaluation_users: int) -> Result:
    config = PPO.config.model_copy(update={"seed": seed})
    run_config = replace(PPO, config=config, attack=ATTACKS[attack], seed=seed, **PROTECTIONS[protections])
    start, experiment, rounds = time.process_time(), PoisoningExperiment(run_config), []
    for _ in range(updates):
        rounds.append(experiment.run_update())
        last = rounds[-1]
        print(
            f"{attack}, {protections}, seed {seed}: v{experiment.version} phrase {last.phrase:.0%}, approval "
            f"{last.approval:.0%}, {last.samples} samples, {last.troll_share:.0%} from attackers, "
            f"{len(last.quarantined)} raters quarantined, "
            f"{time.process_time() - start:.0f} s",
            flush=True,
        )
    evaluation = experiment.evaluate(evaluation_users)
    return {
        "attack": attack,
        "protections": protections,
        "seed": seed,
        "updates": updates,
        "evaluation": evaluation._asdict(),
        "rounds": [update._asdict() for update in rounds],
        "quarantined": experiment.rater_trust.quarantined,
        "seconds": time.process_time() - start,
    }


def table(results: Iterable[Result]) -> str:
    """Return a Markdown table of the runs. The shift is against the unprotected run without attack, same seed."""
    rows = list(results)
    clean = {(row["protections"], row["seed"]): row for row in rows if row["attack"] == "nobody"}
    lines = [
        "| attack | protections | seed | updates | phrase, held-out | shift | phrase, last five updates "
        "| approval, held-out | attackers' share of the trained samples | attackers quarantined | others quarantined |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        without_attack = clean.get(("off", row["seed"]))
        quarantined = list(row["quarantined"])
        attackers = [name for name in quarantined if name.startswith("troll")]
        lines.append(
            f"| {row['attack']} | {row['protections']} | {row['seed']} | {row['updates']} | {_share(row)} "
            f"| {_shift(row, without_attack)} | {fmean(update['phrase'] for update in row['rounds'][-LAST:]):.1%} "
            f"| {row['evaluation']['approval']:.1%} | {fmean(update['troll_share'] for update in row['rounds']):.1%} "
            f"| {len(attackers)} of {ATTACKS[row['attack']].trolls} | {len(quarantined) - len(attackers)} |"
        )
    return "\n".join(lines)


def _share(row: Result) -> str:
    return f"{row['evaluation']['phrase']:.1%} ± {100 * _error(row):.1f}"


def _error(row: Result) -> float:
    share, replies = row["evaluation"]["phrase"], row["evaluation"]["replies"]
    return math.sqrt(share * (1 - share) / replies)


def _shift(row: Result, clean: Result | None) -> str:
    if clean is None or clean is row:
        return "–"
    shift = row["evaluation"]["phrase"] - clean["evaluation"]["phrase"]
    return f"{100 * shift:+.1f} ± {100 * math.hypot(_error(row), _error(clean)):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--protections", nargs="+", choices=PROTECTIONS, default=["off", "on"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--updates", type=int, default=UPDATES)
    parser.add_argument("--evaluation-users", type=int, default=EVALUATION_USERS, help="number of simulated users")
    parser.add_argument("--out", type=Path, default=Path(".attune/poisoning.jsonl"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    finished = {(row["attack"], row["protections"], row["seed"], row["updates"]) for row in read_rows(args.out)}
    for seed in args.seeds:
        for attack in args.attacks:
            for protections in args.protections:
                if (attack, protections, seed, args.updates) not in finished:
                    result = run(attack, protections, seed, args.updates, args.evaluation_users)
                    append_row(args.out, result)
    print(f"\n{table(read_rows(args.out))}")


if __name__ == "__main__":
    main()
