"""Measure what raters who say nothing cost: `python -m tests.benchmarks.noisy_raters`.

The service's updates on the demo model, at most 24 samples each. `--raters` people return again and again; a share of
their votes says nothing about the reply (`NOISE`). The service's caps, quarantine and weights apply
(`tests/support/offline/poisoning.py`). No two raters vote on the same turn, so that nobody's agreement is known. A vote
beyond a rater's share waits for the next batch. A finished run is a line in `--out` and is not repeated; the table at
the end has every run in it.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, Literal

import torch

from alignment.signals import rater_trust
from alignment.types import Sample
from demo.train import MODEL
from tests.benchmarks.learning import change_settings, percent
from tests.benchmarks.results import append_row, read_rows
from tests.benchmarks.votes_figures import interval
from tests.support.offline.experiment import Experiment
from tests.support.offline.poisoning import RATER_SHARE, InMemoryRaterTrust, RatedSample, assemble_batch
from tests.support.offline.service_defaults import BATCH_SIZE, service_run
from tests.support.rater_trust import sample_quota

ALGORITHMS: dict[str, dict[str, Any]] = {"PPO": {"type": "ppo"}, "KTO": {"type": "kto"}}
Noise = Literal["none", "coin-raters", "coin-votes", "up-raters"]
NOISE: dict[Noise, str] = {
    "none": "none",
    "coin-raters": "30 % of the raters flip coins",
    "coin-votes": "30 % of the votes are coin flips",
    "up-raters": "30 % of the raters always say up",
}
SHARE = 0.3  # of the raters, or of the votes
RATERS = 100
UPDATES = 12  # 288 votes
HELD_OUT = 48  # replies without a vote that the trainer is given
EVALUATED = (-2, 0)  # versions, from the last one
USERS = 64  # of an evaluation: about 190 replies


@dataclass(frozen=True)
class Result:
    """One run. `approvals` are those of the last versions (EVALUATED); `noise_share` is that of the weights.

    Example: Result(name="PPO", label="", noise="none", seed=41, raters=100, updates=12, approvals=[0.8, 0.85],
                    samples=[24, …], noise_share=[0.0, …], quarantined=["user-4"])
    """

    name: str
    label: str
    noise: Noise
    seed: int
    raters: int
    updates: int
    approvals: list[float]
    samples: list[int]
    noise_share: list[float]
    quarantined: list[str]


class NoisyRaters:
    """The raters' votes, from those of the hidden preferences, and the service's view of the raters."""

    def __init__(self, noise: Noise, seed: int, raters: int) -> None:
        self.noise, self.rng, self.trust = noise, Random(f"raters {seed}"), InMemoryRaterTrust()
        self.names = [f"user-{number}" for number in range(raters)]
        self.noisy = set(self.names[: round(SHARE * raters)]) if noise in ("coin-raters", "up-raters") else set[str]()
        self.noisy_turns = set[str]()
        self.waiting: list[RatedSample] = []

    def vote(self, samples: Sequence[Sample]) -> None:
        """Add the votes on these replies. The chats of a rater are chosen by their names, with equal chances."""
        votes = [self._vote(sample) for sample in samples]
        self.trust.update(votes)
        self.waiting += votes

    def take_batch(self) -> list[Sample]:
        """Return the samples of an update, within each rater's share. The others wait."""
        accepted = [rated for rated in self.waiting if rated.rater not in self.trust.quarantined]
        quota = sample_quota(int(RATER_SHARE * BATCH_SIZE), rater_trust.rater_weight(0, 0))
        batch = assemble_batch(accepted, quota, BATCH_SIZE)[:BATCH_SIZE]
        taken = {rated.sample.turn_id for rated in batch}
        self.waiting = [rated for rated in accepted if rated.sample.turn_id not in taken]
        return [rated.sample for rated in batch]

    def share_of_noise(self, samples: Sequence[Sample]) -> float:
        noise = sum(sample.weight for sample in samples if sample.turn_id in self.noisy_turns)
        return noise / sum(sample.weight for sample in samples)

    def _vote(self, sample: Sample) -> RatedSample:
        rater = Random(f"rater of {sample.conversation}").choice(self.names)
        is_noise = rater in self.noisy or (self.noise == "coin-votes" and self.rng.random() < SHARE)
        reward = sample.reward
        if is_noise:
            self.noisy_turns.add(sample.turn_id)
            is_up = self.noise == "up-raters" or self.rng.random() < 0.5
            reward = 1.0 if is_up else -1.0
        return RatedSample(rater, replace(sample, reward=reward))


def run(
    name: str, label: str, noise: Noise, seed: int, raters: int, updates: int, changes: Sequence[str] = ()
) -> Result:
    experiment = Experiment(MODEL, change_settings(service_run(ALGORITHMS[name], seed), changes))
    crowd = NoisyRaters(noise, seed, raters)
    approvals, counts, shares = list[float](), list[int](), list[float]()
    for _ in range(updates):
        crowd.vote(experiment.collect_votes().samples)
        samples = crowd.take_batch()
        counts.append(len(samples))
        shares.append(crowd.share_of_noise(samples))
        experiment.train(samples, experiment.collect_unrated(HELD_OUT))
        if experiment.version - updates in EVALUATED:
            approvals.append(experiment.evaluate_newest(USERS)[0])
        print(
            f"{name} {label} {noise} seed {seed}: v{experiment.version}, {counts[-1]} samples, noise {shares[-1]:.0%}"
            + (f", {approvals[-1]:.0%}" if approvals else ""),
            flush=True,
        )
    quarantined = sorted(crowd.trust.quarantined)
    return Result(name, label, noise, seed, raters, updates, approvals, counts, shares, quarantined)


def table(results: Iterable[Result]) -> str:
    """Return a Markdown table with a row for each algorithm, label and noise: approval as the mean of `approvals`.

    The loss is the mean difference to the runs of the same seeds without noise, in points, with its 95 % interval.
    """
    groups: dict[tuple[str, str, int, int, Noise], list[Result]] = defaultdict(list)
    for result in results:
        groups[result.name, result.label, result.raters, result.updates, result.noise].append(result)
    lines = [
        "| algorithm | raters | updates | noise | seeds | its share of what was learned from | approval by seed | mean "
        "| loss | quarantined |",
        "|" + "---|" * 10,
    ]
    for (name, label, raters, updates, noise), runs in groups.items():
        approvals, seeds = [fmean(run.approvals) for run in runs], ", ".join(str(run.seed) for run in runs)
        clean = {run.seed: fmean(run.approvals) for run in groups.get((name, label, raters, updates, "none"), [])}
        losses = [
            100 * (clean[run.seed] - approval)
            for run, approval in zip(runs, approvals, strict=True)
            if noise != "none" and run.seed in clean
        ]
        lines.append(
            f"| {f'{name} {label}'.strip()} | {raters} | {updates} | {NOISE[noise]} | {seeds} "
            f"| {fmean(share for run in runs for share in run.noise_share):.0%} "
            f"| {', '.join(f'{approval:.0%}' for approval in approvals)} | {percent(approvals)} "
            f"| {interval(losses)} | {fmean(len(run.quarantined) for run in runs):.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--noise", nargs="+", choices=NOISE, default=list(NOISE))
    parser.add_argument("--seeds", nargs="+", type=int, default=[41, 57])
    parser.add_argument("--raters", type=int, default=RATERS)
    parser.add_argument("--updates", type=int, default=UPDATES)
    parser.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="for example kl_target=0.001")
    parser.add_argument("--label", default="", help="names runs of another commit or with other settings")
    parser.add_argument("--out", type=Path, default=Path("docs/measurements/noisy_raters.jsonl"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.algorithms:
        for noise in args.noise:
            for seed in args.seeds:
                key = (name, args.label, noise, seed, args.raters, args.updates)
                finished = [Result(**row) for row in read_rows(args.out)]
                if key not in {(r.name, r.label, r.noise, r.seed, r.raters, r.updates) for r in finished}:
                    append_row(args.out, asdict(run(*key, args.set)))
    print(f"\n{table(Result(**row) for row in read_rows(args.out))}")


if __name__ == "__main__":
    main()
