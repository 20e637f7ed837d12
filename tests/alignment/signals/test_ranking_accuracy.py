"""A reward model is admitted and disabled by how well it orders replies, with bounds that hold after few votes."""

import random
from collections import Counter
from statistics import NormalDist

import pytest

from alignment.config.rewards import RewardModelSource
from alignment.signals.proportions import wilson_interval
from alignment.signals.ranking_accuracy import RankEvidence, RankStratum, rank_pairs, rank_votes

THRESHOLD = RewardModelSource().min_agreement
FITS = (60, 90, 120)  # votes at a fit: the recipe for sparse feedback
HELD_OUT = 0.2
SERIES = 200


def draw_votes(rng: random.Random, count: int, share_up: float, accuracy: float) -> list[tuple[float, float]]:
    """Return (vote, score): normal scores of which the best threshold is right in this share of either class."""
    distance = 2 * NormalDist().inv_cdf(accuracy)
    votes = [1.0 if rng.random() < share_up else -1.0 for _ in range(count)]
    return [(vote, rng.gauss(distance * (vote > 0), 1.0)) for vote in votes]


def run_series(rng: random.Random, share_up: float, accuracy: float) -> list[bool]:
    """Return, for each fit of a series, whether the model is admitted by votes that were predicted before it knew them.

    These are the held-out votes of this fit, and the votes that came between two fits, predicted by the model before.
    """
    earlier: list[RankStratum] = []
    admitted: list[bool] = []
    for before, count in zip((0, *FITS), FITS, strict=False):
        earlier += rank_votes(draw_votes(rng, count - before, share_up, accuracy)) if before else []
        held_out = rank_votes(draw_votes(rng, round(HELD_OUT * FITS[0]), share_up, accuracy))
        admitted.append(RankEvidence((*earlier, *held_out)).bounds().low > THRESHOLD)
    return admitted


def share_of_series(share_up: float, accuracy: float) -> list[float]:
    """Return the share of series in which a model was admitted by the first, second, … fit at the latest."""
    rng, counts = random.Random(0), Counter[int]()
    for _ in range(SERIES):
        admitted = run_series(rng, share_up, accuracy)
        counts.update(number for number in range(len(FITS)) if any(admitted[: number + 1]))
    return [counts[number] / SERIES for number in range(len(FITS))]


@pytest.mark.parametrize("share_up", [0.5, 0.85])
def test_a_right_model_is_admitted_and_a_useless_one_is_not(share_up: float) -> None:
    """With a seeded generator, so the figures are the same in every run; docs/rewards.md has them."""
    useless, right = share_of_series(share_up, 0.5), share_of_series(share_up, 0.8)
    assert useless[-1] < 0.1, useless
    assert right[1] > 0.6 and right[2] > 0.85, right


@pytest.mark.parametrize("share_up", [0.5, 0.85])
def test_a_useless_model_is_disabled_as_reliably_as_a_right_one_is_kept(share_up: float) -> None:
    rng = random.Random(1)

    def share_below_chance(accuracy: float, count: int) -> float:
        bounds = [
            RankEvidence(tuple(rank_votes(draw_votes(rng, count, share_up, accuracy)))).bounds() for _ in range(200)
        ]
        return sum(bound.low <= 0.5 for bound in bounds) / len(bounds)

    assert share_below_chance(0.5, 40) > 0.9
    assert share_below_chance(0.8, 40) < 0.1


def test_ties_count_half_and_votes_of_nothing_are_skipped() -> None:
    assert rank_votes([(1.0, 0.5), (1.0, 0.1), (-1.0, 0.1), (0.0, 9.0)]) == [RankStratum(2, 1, 0.75)]
    assert rank_pairs([0.3, -0.2, 0.0, 1.0]) == [RankStratum(4, 0, 0.625)]
    assert rank_votes([(1.0, 0.5)]) == rank_pairs([]) == []


def test_bounds_are_wide_after_few_votes_even_if_all_are_right() -> None:
    few, many = RankEvidence((RankStratum(3, 3, 1.0),)), RankEvidence((RankStratum(60, 60, 1.0),))
    assert 0.4 < few.bounds().low < 0.6 and few.bounds().high == 1.0
    assert many.bounds().low > 0.9
    assert RankEvidence().auc is None and RankEvidence().bounds() == (0.0, 1.0)


def test_each_models_scores_are_compared_with_each_other_alone() -> None:
    """Scores on another scale would make the order of all of them meaningless."""
    first, second = [(1.0, 10.0), (-1.0, 9.0)], [(1.0, 0.2), (-1.0, 0.1)]
    evidence = RankEvidence((*rank_votes(first), *rank_votes(second)))
    assert (evidence.auc, evidence.num_votes) == (1.0, 4)
    assert rank_votes([*first, *second])[0].auc == 0.75


def test_the_bound_of_pairs_is_wilsons() -> None:
    evidence = RankEvidence((RankStratum(20, 0, 0.5),))
    assert evidence.bounds(1.96) == pytest.approx(wilson_interval(10, 20, 1.96), abs=1e-9)
