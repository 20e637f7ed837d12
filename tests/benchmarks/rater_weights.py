"""Compute what weights of raters can win: `python -m tests.benchmarks.rater_weights`.

Simulated votes without a model; a minute. A vote pulls the policy gradient along its reply, by weight × (reward −
baseline). Of the votes of a crowd the signal is Σ weight · advantage · quality of the reply, the noise is the root of
Σ (weight · advantage)². The table has signal² / noise² for each vote, as a share of what as many votes of raters
without noise give: 0.5 means that twice the votes are needed. A rater is known by `VOTES` earlier votes. Raters who say
nothing are 30 % of the crowd.

"Constancy" is the posterior probability that a rater is not one who always says the same; "up alone" doubts those who
say up alone. "Own mean" compares a vote with the rater's own mean, to which the crowd's counts like 4 votes.
"Predicted" is the service's weight (`rater_weight`), from agreement with a predictor of the votes that has not learned
from them, such as a judge, and is right in 80 %.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from statistics import fmean
from typing import NamedTuple

from alignment.signals.rater_trust import rater_weight

RATERS = 200
SHARE = 0.3  # of the raters, who say nothing
CONSTANT = 0.1  # prior probability of a rater who always says the same
OWN_MEAN_PRIOR = 4  # votes
ACCURACY = 0.8  # of the predictor
VOTES = (3, 6, 12, 20, 50)
NEW_VOTES = 8  # of each rater, which are learned from
APPROVALS = (0.4, 0.6, 0.85)
CROWDS = 20
# The rest are people who rate each reply by its quality.
RATER_MIX: dict[str, Mapping[str, float]] = {
    "nobody": {},
    "coin flips": {"coin": SHARE},
    "always up": {"up": SHARE},
    "nobody, 30 % rate only what they dislike": {"critic": SHARE},
    "always up, 30 % rate only what they dislike": {"up": SHARE, "critic": SHARE},
}


class Vote(NamedTuple):
    """A vote, the reply's quality, and what the predictor said: each is True for up or good."""

    is_up: bool
    is_good: bool
    predicted: bool


@dataclass
class History:
    """What is known of a rater, and the share of ups among the others' votes."""

    up: int = 0
    down: int = 0
    agreed: float = 0.0
    disagreed: float = 0.0
    others: float = 0.5

    def add(self, vote: Vote) -> None:
        self.up += vote.is_up
        self.down += not vote.is_up
        weight = 2 * ACCURACY - 1
        self.agreed += weight * (vote.is_up == vote.predicted)
        self.disagreed += weight * (vote.is_up != vote.predicted)


def constancy(known: History, *, is_down_doubted: bool = True) -> float:
    """Return the posterior probability of a rater who does not always say the same.

    Example: constancy(History(up=5, others=0.5)) -> 0.9 · 0.5^5 / (0.9 · 0.5^5 + 0.1) = 0.22
    """
    if (known.up and known.down) or (known.down and not is_down_doubted):
        return 1.0
    likelihood = (1 - CONSTANT) * (known.others**known.up) * ((1 - known.others) ** known.down)
    return likelihood / (likelihood + CONSTANT)


WEIGHTS: dict[str, Callable[[History], float]] = {
    "none": lambda known: 1.0,
    "constancy": constancy,
    "constancy, up alone": lambda known: constancy(known, is_down_doubted=False),
    "own mean": lambda known: 1.0,
    "predicted": lambda known: rater_weight(known.agreed, known.disagreed),
}


def draw_vote(kind: str, approval: float, rng: Random) -> Vote:
    is_good = rng.random() < approval
    while kind == "critic" and is_good:
        is_good = rng.random() < approval
    is_up = {"up": True, "coin": rng.random() < 0.5}.get(kind, is_good)
    return Vote(is_up, is_good, is_good == (rng.random() < ACCURACY))


def efficiency(mix: str, weights: str, votes: int, approval: float, seed: int) -> float:
    """Return signal² / noise² for each vote."""
    rng = Random(f"{mix} {votes} {approval} {seed}")
    kinds = list(_kinds(RATER_MIX[mix]))
    histories = [History() for _ in kinds]
    for kind, known in zip(kinds, histories, strict=True):
        for _ in range(votes):
            known.add(draw_vote(kind, approval, rng))
    total_up = sum(known.up for known in histories)
    for known in histories:
        known.others = (total_up - known.up) / (votes * (RATERS - 1))
    rows = [
        (WEIGHTS[weights](known), known, draw_vote(kind, approval, rng))
        for kind, known in zip(kinds, histories, strict=True)
        for _ in range(NEW_VOTES)
    ]
    mean = sum(weight * _sign(vote.is_up) for weight, _, vote in rows) / sum(weight for weight, _, _ in rows)
    signal = noise = 0.0
    for weight, known, vote in rows:
        crowd = OWN_MEAN_PRIOR * (2 * total_up / (votes * RATERS) - 1)
        baseline = (known.up - known.down + crowd) / (votes + OWN_MEAN_PRIOR) if weights == "own mean" else mean
        pull = weight * (_sign(vote.is_up) - baseline)
        signal += pull * (_sign(vote.is_good) - (2 * approval - 1))
        noise += pull**2
    return signal**2 / noise / len(rows)


def _kinds(mix: Mapping[str, float]) -> Iterator[str]:
    for kind, share in mix.items():
        yield from [kind] * round(share * RATERS)
    yield from ["honest"] * (RATERS - sum(round(share * RATERS) for share in mix.values()))


def _sign(is_positive: bool) -> float:
    return 1.0 if is_positive else -1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--crowds", type=int, default=CROWDS, help="simulated crowds, over which the table is a mean")
    crowds = range(parser.parse_args().crowds)

    def mean(mix: str, weights: str, votes: int, approval: float) -> float:
        return fmean(efficiency(mix, weights, votes, approval, seed) for seed in crowds)

    header = "".join(f" {votes} votes |" for votes in VOTES)
    print(f"| approval | who says nothing | weights |{header}\n|{'---|' * (3 + len(VOTES))}")
    for approval in APPROVALS:
        clean = mean("nobody", "none", VOTES[0], approval)
        for mix in RATER_MIX:
            for weights in WEIGHTS:
                cells = "".join(f" {mean(mix, weights, votes, approval) / clean:.2f} |" for votes in VOTES)
                print(f"| {approval:.0%} | {mix} | {weights} |{cells}", flush=True)


if __name__ == "__main__":
    main()
