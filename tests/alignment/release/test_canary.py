"""A canary's verdict, from counts alone."""

import math
from dataclasses import replace
from statistics import median

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError

from alignment.release.canary import Arm, CanaryConfig, judge, worse

CONFIG = CanaryConfig()
QUIET = CanaryConfig(patience_seconds=1e9)
STABLE = Arm(turns=400, failed=4, rated=200, good=160, mean_length=50.0, seconds_per_token=0.02)

MARGINS = st.floats(-0.95, 0.95)
CHANCES = st.floats(0.001, 0.999)


@st.composite
def counts(draw: st.DrawFn, least: int = 0, most: int = 3000) -> tuple[int, int]:
    n = draw(st.integers(least, most))
    return draw(st.integers(0, n)), n


# evidence


def test_evidence_by_hand() -> None:
    # mixture 1/2 · 1/2; likeliest with equal chances: 1/2 · 1/2
    assert worse(0, 1, 1, 1) == pytest.approx(0.0, abs=1e-12)
    # 1/3 · 1/3 over (1/2)^4
    assert worse(0, 2, 2, 2) == pytest.approx(math.log(16 / 9))
    # B(2, 2)² = 1/36; observed shares may be equal, so they are the likeliest: (1/2)^4
    assert worse(1, 2, 1, 2) == pytest.approx(math.log(16 / 36))
    # p_b = p_a + 1/2: (1 − p_a)(p_a + 1/2) is most at p_a = 1/4, 9/16
    assert worse(0, 1, 1, 1, 0.5) == pytest.approx(math.log(1 / 4 / (9 / 16)))
    # p_b = p_a − 1/2: (1 − p_a)(p_a − 1/2) is most at p_a = 3/4, 1/16
    assert worse(0, 1, 1, 1, -0.5) == pytest.approx(math.log(4))
    # no b is good, and p_a ≥ p_b + 1/2: p_b = 0, p_a = 1/2; mixture 1/4 over 1/2
    assert worse(0, 1, 0, 1, -0.5) == pytest.approx(math.log(1 / 2))


def test_without_anything_to_compare_there_is_no_evidence() -> None:
    assert worse(0, 0, 0, 0) == worse(0, 0, 500, 500) == worse(0, 500, 0, 0) == worse(0, 0, 500, 500, -0.1) == 0.0


@pytest.mark.parametrize("counted", [(3, 2, 0, 1), (-1, 2, 0, 1), (0, 1, 2, 1), (0, 1, 0, 1, 1.0), (0, 1, 0, 1, -1.0)])
def test_counts_that_cannot_be_are_refused(counted: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="no such counts"):
        worse(*counted)


@given(counts(), counts(), MARGINS)
def test_evidence_is_finite_and_the_same_told_from_the_bad_ones(
    a: tuple[int, int], b: tuple[int, int], margin: float
) -> None:
    evidence = worse(*a, *b, margin)
    assert math.isfinite(evidence)
    # a's good ones are rarer than b's exactly if b's bad ones are rarer than a's
    assert worse(b[1] - b[0], b[1], a[1] - a[0], a[1], margin) == pytest.approx(evidence, rel=1e-6, abs=1e-6)


@given(counts(1), counts(1), MARGINS)
def test_only_one_side_can_be_shown_to_be_worse(a: tuple[int, int], b: tuple[int, int], margin: float) -> None:
    assert min(worse(*a, *b, margin), worse(*b, *a, -margin)) <= 1e-6


@given(counts(1), counts(1), MARGINS, CHANCES, CHANCES)
def test_no_chances_that_the_null_allows_are_likelier_than_what_it_is_held_against(
    a: tuple[int, int], b: tuple[int, int], margin: float, p_a: float, p_b: float
) -> None:
    assume(p_a >= p_b - margin)

    def mixture_over_likelihood(good: int, n: int, p: float) -> float:
        mixture = math.lgamma(good + 1) + math.lgamma(n - good + 1) - math.lgamma(n + 2)
        return mixture - good * math.log(p) - (n - good) * math.log(1 - p)

    assert worse(*a, *b, margin) <= mixture_over_likelihood(*a, p_a) + mixture_over_likelihood(*b, p_b) + 1e-6


@given(counts(1), counts(1), MARGINS, MARGINS)
def test_more_margin_is_harder_to_show(a: tuple[int, int], b: tuple[int, int], one: float, other: float) -> None:
    less, more = sorted((one, other))
    assert worse(*a, *b, less) >= worse(*a, *b, more) - 1e-6


@pytest.mark.parametrize("margin", [-0.3, -0.1, 0.0, 0.1, 0.3])
def test_what_speaks_against_a_gains_from_its_bad_ones_and_from_the_others_good_ones(margin: float) -> None:
    sizes = (1, 3, 7, 20)
    tables = [(i, n, j, m) for n in sizes for m in sizes for i in range(n + 1) for j in range(m + 1)]
    speaking = [table for table in tables if worse(*table, margin) > 0]
    assert len(speaking) > 40
    for good_a, n_a, good_b, n_b in speaking:
        evidence = worse(good_a, n_a, good_b, n_b, margin)
        assert good_a == 0 or worse(good_a - 1, n_a, good_b, n_b, margin) > evidence
        assert good_b == n_b or worse(good_a, n_a, good_b + 1, n_b, margin) > evidence


@pytest.mark.parametrize("margin", [0.0, 0.1, -0.1])
@pytest.mark.parametrize("p_b", [0.2, 0.5, 0.8])
def test_where_a_is_no_worse_the_evidence_is_worth_at_most_one_on_average(margin: float, p_b: float) -> None:
    n_a, n_b, p_a = 12, 30, p_b - margin
    ways = [
        math.comb(n_a, i) * p_a**i * (1 - p_a) ** (n_a - i) * math.comb(n_b, j) * p_b**j * (1 - p_b) ** (n_b - j)
        for i in range(n_a + 1)
        for j in range(n_b + 1)
    ]
    worth = [math.exp(worse(i, n_a, j, n_b, margin)) for i in range(n_a + 1) for j in range(n_b + 1)]
    assert sum(ways) == pytest.approx(1)
    assert 0.01 < sum(way * each for way, each in zip(ways, worth, strict=True)) <= 1


# many looks


def _looks(rng: np.random.Generator, chance: float, steps: np.ndarray) -> list[tuple[int, int]]:
    """(good, rated) after each look; `steps` rated replies come between two."""
    return list(zip(rng.binomial(steps, chance).cumsum().tolist(), steps.cumsum().tolist(), strict=True))


def _first(config: CanaryConfig, p_candidate: float, p_stable: float, rng: np.random.Generator) -> tuple[str, int]:
    """What comes of it, and after how many rated replies of the candidate; looked at after each of them."""
    rated = 1500
    between = rng.geometric(config.share, rated) - 1
    arms = zip(_looks(rng, p_candidate, np.ones(rated, int)), _looks(rng, p_stable, between), strict=True)
    for (good, heard), (stable_good, stable_heard) in arms:
        stable = Arm(turns=stable_heard, rated=stable_heard, good=stable_good)
        action = judge(config, Arm(turns=heard, rated=heard, good=good), stable, 0).action
        if action != "wait":
            return action, heard
    return "wait", rated


def test_500_looks_at_two_equal_versions_raise_no_more_false_alarms_than_promised() -> None:
    rng, config, runs = np.random.default_rng(3), CanaryConfig(alpha=0.2, min_rated=10**6), 60
    alarms = naive = 0
    for _ in range(runs):
        candidate, stable = _looks(rng, 0.8, np.full(500, 1)), _looks(rng, 0.8, rng.poisson(9, 500))
        pairs = list(zip(candidate, stable, strict=True))
        alarms += any(
            judge(config, Arm(n, 0, n, good), Arm(m, 0, m, other), 0).action == "roll_back"
            for (good, n), (other, m) in pairs
        )
        naive += any(_z_test(good, n, other, m) for (good, n), (other, m) in pairs[20:])
    assert naive > 0.2 * runs, "looked at so often, a test for one look is wrong far more than once in twenty"
    assert alarms <= 0.2 * runs


def _z_test(good: int, n: int, other: int, m: int) -> bool:
    pooled = (good + other) / (n + m)
    spread = math.sqrt(pooled * (1 - pooled) * (1 / n + 1 / m)) if 0 < pooled < 1 else math.inf
    return (other / m - good / n) / spread > 1.645


def test_a_candidate_that_is_worse_by_the_margin_goes_live_no_more_often_than_promised() -> None:
    rng, config = np.random.default_rng(5), CanaryConfig(share=0.1, alpha=0.2, patience_seconds=1e9)
    outcomes = [_first(config, 0.7, 0.8, rng)[0] for _ in range(30)]
    assert outcomes.count("promote") <= 0.2 * 30
    assert outcomes.count("roll_back") >= 24


@pytest.mark.parametrize(
    "share, p_candidate, action, at_most",
    [
        (0.05, 0.4, "roll_back", 45),
        (0.1, 0.4, "roll_back", 45),
        (0.05, 0.85, "promote", 260),
        (0.05, 0.8, "promote", 700),
    ],
)
def test_few_ratings_decide(share: float, p_candidate: float, action: str, at_most: int) -> None:
    rng, config = np.random.default_rng(7), QUIET.model_copy(update={"share": share})
    outcomes = [_first(config, p_candidate, 0.8, rng) for _ in range(21)]
    assert [came for came, _ in outcomes].count(action) >= 20
    assert CONFIG.min_rated / 2 < median(rated for _, rated in outcomes) <= at_most


# verdicts


def test_one_that_is_liked_as_well_goes_live_and_the_reason_says_why() -> None:
    verdict = judge(CONFIG, Arm(turns=500, failed=5, rated=200, good=180, mean_length=55.0), STABLE, 60)
    assert verdict.action == "promote"
    assert "90% of 200 rated against 80% of 200 rated" in verdict.reason
    assert verdict.figures["approval"] == 0.9 and verdict.figures["stable_approval"] == 0.8
    assert verdict.figures["no_worse"] == worse(160, 200, 180, 200, -0.1) >= verdict.figures["promote_at"]
    assert verdict.figures["length_ratio"] == pytest.approx(1.1) and "latency_ratio" not in verdict.figures


def test_no_promotion_before_enough_replies_and_ratings() -> None:
    liked = Arm(turns=500, rated=200, good=180)
    assert judge(CONFIG, liked, STABLE, 60).action == "promote"
    assert judge(CONFIG.model_copy(update={"min_rated": 201}), liked, STABLE, 60).action == "wait"
    assert judge(CONFIG.model_copy(update={"min_turns": 501}), liked, STABLE, 60).action == "wait"
    assert judge(CONFIG.model_copy(update={"margin": 0.0}), liked, STABLE, 60).action == "wait"


def test_less_approval_takes_it_back() -> None:
    verdict = judge(CONFIG, Arm(turns=60, rated=30, good=9), STABLE, 60)
    assert verdict.action == "roll_back"
    assert verdict.reason == "less approval: 30% of 30 rated against 80% of 200 rated, sure to 0.995"
    assert verdict.figures["less_approval"] == worse(9, 30, 160, 200) >= math.log(200) == verdict.figures["alarm_at"]


def test_a_candidate_that_always_fails_is_taken_back_after_a_handful() -> None:
    verdicts = [judge(CONFIG, Arm(turns=n, failed=n), STABLE, 1) for n in range(12)]
    assert [verdict.action for verdict in verdicts[:2]] == ["wait", "wait"]
    assert verdicts[6].action == "roll_back" and "6 of 6 against 4 of 400" in verdicts[6].reason
    assert judge(CONFIG, Arm(turns=6, failed=6), Arm(turns=100, failed=100), 1).action == "wait", "all fail alike"


def test_an_alarm_outweighs_approval() -> None:
    liked = Arm(turns=500, failed=50, rated=200, good=190)
    assert judge(CONFIG, replace(liked, failed=5), STABLE, 60).action == "promote"
    assert judge(CONFIG, liked, STABLE, 60).action == "roll_back"


@pytest.mark.parametrize("length, fine", [(24.9, False), (25.0, True), (100.0, True), (100.1, False), (0.0, False)])
def test_replies_of_another_length_are_taken_back_once_there_are_enough(length: float, fine: bool) -> None:
    candidate = Arm(turns=20, mean_length=length)
    verdict = judge(CONFIG, candidate, STABLE, 60)
    assert verdict.action == ("wait" if fine else "roll_back")
    assert fine or "times the length" in verdict.reason
    assert judge(CONFIG, replace(candidate, turns=19), STABLE, 60).action == "wait"
    assert judge(CONFIG, candidate, replace(STABLE, turns=19), 60).action == "wait"
    assert judge(CONFIG, candidate, replace(STABLE, mean_length=None), 60).action == "wait"
    assert judge(CONFIG, candidate, replace(STABLE, mean_length=0.0), 60).action == "wait"


def test_a_slower_one_is_taken_back_and_a_faster_one_is_not() -> None:
    candidate = Arm(turns=20, seconds_per_token=0.041)
    assert "2.05 times as long" in judge(CONFIG, candidate, STABLE, 60).reason
    assert judge(CONFIG, candidate, STABLE, 60).action == "roll_back"
    assert judge(CONFIG, replace(candidate, turns=19), STABLE, 60).action == "wait"
    assert judge(CONFIG, replace(candidate, seconds_per_token=0.04), STABLE, 60).action == "wait"
    assert judge(CONFIG, replace(candidate, seconds_per_token=0.001), STABLE, 60).action == "wait"


@pytest.mark.parametrize(
    "candidate, stable",
    [
        (Arm(), Arm()),
        (Arm(), STABLE),
        (Arm(turns=500, rated=200, good=200), Arm()),
        (Arm(turns=500, failed=500), Arm()),
        (Arm(turns=500, rated=19, good=19), STABLE),
    ],
    ids=["nothing at all", "nothing of it", "nothing beside it", "failures with nothing beside", "too few ratings"],
)
def test_silence_is_waited_for_and_then_counts_against_the_candidate(candidate: Arm, stable: Arm) -> None:
    assert judge(CONFIG, candidate, stable, CONFIG.patience_seconds).action == "wait"
    late = judge(CONFIG, candidate, stable, CONFIG.patience_seconds + 1)
    assert late.action == "roll_back"
    assert late.reason.startswith("not enough was heard in 1801 s")
    assert f"{candidate.rated} of 20 rated" in late.reason
    assert ("against nothing rated" in late.reason) is (stable.rated == 0)


@pytest.mark.parametrize(("good", "action"), [(17, "promote"), (14, "promote"), (13, "roll_back")])
def test_when_patience_ends_what_was_heard_decides_if_it_is_enough(good: int, action: str) -> None:
    candidate = Arm(turns=25, rated=20, good=good)  # 0.85, 0.7 and 0.65, against 0.8 with a margin of 0.1
    assert judge(CONFIG, candidate, STABLE, CONFIG.patience_seconds).action == "wait"
    late = judge(CONFIG, candidate, STABLE, CONFIG.patience_seconds + 1)
    assert late.action == action
    assert ("nothing spoke against it" in late.reason) is (action == "promote")
    assert judge(CONFIG, candidate, replace(STABLE, rated=19, good=15), 10**6).action == "roll_back"
    assert judge(CONFIG, replace(candidate, turns=19), STABLE, 10**6).action == "roll_back"


def test_what_is_shown_counts_even_when_patience_is_over() -> None:
    assert judge(CONFIG, Arm(turns=500, rated=200, good=180), STABLE, 10**6).action == "promote"


@pytest.mark.parametrize(
    "settings",
    [
        {"share": 0.0},
        {"share": 1.0},
        {"alpha": 0.95},
        {"margin": 1.0},
        {"patience_seconds": 0},
        {"max_length_ratio": 1.0},
        {"max_latency_ratio": math.nan},
        {"patience": 3},
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        CanaryConfig.model_validate(settings)
