"""What a few trolls teach the demo model, with the protections off and on: `python -m tests.benchmarks.poisoning`.

Every course is 20 updates of 96 replies on one core. A finished course is a line in `--out` and is not made again, so
this can be stopped and taken up; the table at the end is of all that is there.
"""

import argparse
import json
import math
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from alignment.config.algorithm import PPOConfig
from demo.offline.poisoning import Attack, PoisoningConfig, PoisoningExperiment
from tests.benchmarks.learning import _config

UPDATES = 20
EXAMINERS = 256  # about 720 replies: a share of a third has a standard error of 1.7 points
LAST = 5  # rounds at the end whose replies are counted too, beside the examination
PPO = PoisoningConfig(_config(PPOConfig(kl_coef=0.02)))
ATTACKS: dict[str, Attack] = {
    "nobody": Attack(),
    "5 loud": Attack(5, 4),
    "one account": Attack(1, 96),  # half of all thumbs
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


def run(attack: str, protections: str, seed: int, updates: int, examiners: int) -> Result:
    config = PPO.config.model_copy(update={"seed": seed})
    course = replace(PPO, config=config, attack=ATTACKS[attack], seed=seed, **PROTECTIONS[protections])
    began, study, rounds = time.process_time(), PoisoningExperiment(course), []
    for _ in range(updates):
        rounds.append(study.run_update())
        last = rounds[-1]
        print(
            f"{attack}, {protections}, seed {seed}: v{study.version} phrase {last.phrase:.0%}, liked "
            f"{last.approval:.0%}, {last.samples} samples, {last.troll_share:.0%} of trolls, held {len(last.quarantined)}, "
            f"{time.process_time() - began:.0f} s",
            flush=True,
        )
    evaluation = study.evaluate(examiners)
    return {
        "attack": attack,
        "protections": protections,
        "seed": seed,
        "updates": updates,
        "evaluation": evaluation._asdict(),
        "rounds": [one._asdict() for one in rounds],
        "held": study.rater_trust.quarantined,
        "seconds": time.process_time() - began,
    }


def finished(out: Path) -> list[Result]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def table(results: Iterable[Result]) -> str:
    """Markdown: one line an attack, and the shift against the clean course of the same protections and seed."""
    rows = list(results)
    clean = {(row["protections"], row["seed"]): row for row in rows if row["attack"] == "nobody"}
    lines = [
        "| raters who push | protections | seed | updates | phrase, held-out | shift | phrase, last five rounds "
        "| liked, held-out | trolls' share of what was learned | trolls held | others held |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        without_attack = clean.get(("off", row["seed"]))
        held = list(row["held"])
        trolls = [name for name in held if name.startswith("troll")]
        lines.append(
            f"| {row['attack']} | {row['protections']} | {row['seed']} | {row['updates']} | {_share(row)} "
            f"| {_shift(row, without_attack)} | {fmean(one['phrase'] for one in row['rounds'][-LAST:]):.1%} "
            f"| {row['evaluation']['approval']:.1%} | {fmean(one['troll_share'] for one in row['rounds']):.1%} "
            f"| {len(trolls)} of {ATTACKS[row['attack']].trolls} | {len(held) - len(trolls)} |"
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
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    given.add_argument("--protections", nargs="+", choices=PROTECTIONS, default=["off", "on"])
    given.add_argument("--seeds", nargs="+", type=int, default=[0])
    given.add_argument("--updates", type=int, default=UPDATES)
    given.add_argument("--examiners", type=int, default=EXAMINERS)
    given.add_argument("--out", type=Path, default=Path(".attune/poisoning.jsonl"))
    asked = given.parse_args()
    torch.set_num_threads(1)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    known = {(row["attack"], row["protections"], row["seed"], row["updates"]) for row in finished(asked.out)}
    for seed in asked.seeds:
        for attack in asked.attacks:
            for protections in asked.protections:
                if (attack, protections, seed, asked.updates) not in known:
                    result = run(attack, protections, seed, asked.updates, asked.examiners)
                    with asked.out.open("a") as file:
                        file.write(json.dumps(result) + "\n")
    print(f"\n{table(finished(asked.out))}")


if __name__ == "__main__":
    main()
