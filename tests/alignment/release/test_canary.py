"""Canary decisions from counts."""

import math
from dataclasses import replace
from statistics import median

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError

from alignment.release.canary import Arm, CanaryConfig, decide, worse_evidence

CONFIG = CanaryConfig()
PATIENT = CanaryConfig(patience_seconds=1e9)
STABLE = Arm(turns=400, failed=4, rated=200, good=160, mean_length=50.0, seconds_per_token=0.02)

MARGINS = st.floats(-0.95, 0.95)
PROBABILITIES = st.floats(0.001, 0.999)


@st.composite
def counts(draw: st.DrawFn, min_rated: int = 0, max_rated: int = 3000) -> tuple[int, int]:
    n = draw(st.integers(min_rated, max_rated))
    return draw(st.integers(0, n)), n


# evidence


def test_evidence_by_hand() -> None:
    # mixture 1/2 · 1/2; maximum likelihood with equal probabilities: 1/2 · 1/2
    assert worse_evidence(0, 1, 1, 1) == pytest.approx(0.0, abs=1e-12)
    # 1/3 · 1/3 over (1/2)^4
    assert worse_evidence(0, 2, 2, 2) == pytest.approx(math.log(16 / 9))
    # B(2, 2)² = 1/36; the observed shares fulfil the null, so they maximize the likelihood: (1/2)^4
    assert worse_evidence(1, 2, 1, 2) == pytest.approx(math.log(16 / 36))
    # p_b = p_a + 1/2: the maximum of (1 − p_a)(p_a + 1/2) is 9/16, at p_a = 1/4
    assert worse_evidence(0, 1, 1, 1, 0.5) == pytest.approx(math.log(1 / 4 / (9 / 16)))
    # p_b = p_a − 1/2: the maximum of (1 − p_a)(p_a − 1/2) is 1/16, at p_a = 3/4
    assert worse_evidence(0, 1, 1, 1, -0.5) == pytest.approx(math.log(4))
    # no reply of b is good, and p_a ≥ p_b + 1/2: p_b = 0, p_a = 1/2; mixture 1/4 over 1/2
    assert worse_evidence(0, 1, 0, 1, -0.5) == pytest.approx(math.log(1 / 2))


def test_no_data_is_no_evidence() -> None:
    assert (
        worse_evidence(0, 0, 0, 0)
        == worse_evidence(0, 0, 500, 500)
        == worse_evidence(0, 500, 0, 0)
        == worse_evidence(0, 0, 500, 500, -0.1)
        == 0.0
    )


@pytest.mark.parametrize(
    "arguments", [(3, 2, 0, 1), (-1, 2, 0, 1), (0, 1, 2, 1), (0, 1, 0, 1, 1.0), (0, 1, 0, 1, -1.0)]
)
def test_impossible_counts_are_rejected(arguments: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="impossible counts"):
        worse_evidence(*arguments)


@given(counts(), counts(), MARGINS)
def test_evidence_is_finite_and_symmetric_in_good_and_bad(
    a: tuple[int, int], b: tuple[int, int], margin: float
) -> None:
    evidence = worse_evidence(*a, *b, margin)
    assert math.isfinite(evidence)
    # a has a lower share of good replies than b exactly if b has a lower share of bad replies than a
    assert worse_evidence(b[1] - b[0], b[1], a[1] - a[0], a[1], margin) == pytest.approx(evidence, rel=1e-6, abs=1e-6)


@given(counts(1), counts(1), MARGINS)
def test_only_one_arm_can_be_shown_to_be_worse(a: tuple[int, int], b: tuple[int, int], margin: float) -> None:
    assert min(worse_evidence(*a, *b, margin), worse_evidence(*b, *a, -margin)) <= 1e-6


@given(counts(1), counts(1), MARGINS, PROBABILITIES, PROBABILITIES)
def test_constrained_mle_is_the_maximum_under_the_null(
    a: tuple[int, int], b: tuple[int, int], margin: float, p_a: float, p_b: float
) -> None:
    assume(p_a >= p_b - margin)

    def mixture_over_likelihood(good: int, n: int, p: float) -> float:
        mixture = math.lgamma(good + 1) + math.lgamma(n - good + 1) - math.lgamma(n + 2)
        return mixture - good * math.log(p) - (n - good) * math.log(1 - p)

    assert worse_evidence(*a, *b, margin) <= mixture_over_likelihood(*a, p_a) + mixture_over_likelihood(*b, p_b) + 1e-6


@given(counts(1), counts(1), MARGINS, MARGINS)
def test_larger_margin_needs_more_evidence(
    a: tuple[int, int], b: tuple[int, int], margin: float, other_margin: float
) -> None:
    smaller, larger = sorted((margin, other_margin))
    assert worse_evidence(*a, *b, smaller) >= worse_evidence(*a, *b, larger) - 1e-6


@pytest.mark.parametrize("margin", [-0.3, -0.1, 0.0, 0.1, 0.3])
def test_evidence_grows_with_bad_ratings_of_one_arm_and_good_ratings_of_the_other(margin: float) -> None:
    sizes = (1, 3, 7, 20)
    tables = [(i, n, j, m) for n in sizes for m in sizes for i in range(n + 1) for j in range(m + 1)]
    conclusive = [table for table in tables if worse_evidence(*table, margin) > 0]
    assert len(conclusive) > 40
    for good_a, n_a, good_b, n_b in conclusive:
        evidence = worse_evidence(good_a, n_a, good_b, n_b, margin)
        assert good_a == 0 or worse_evidence(good_a - 1, n_a, good_b, n_b, margin) > evidence
        assert good_b == n_b or worse_evidence(good_a, n_a, good_b + 1, n_b, margin) > evidence


@pytest.mark.parametrize("margin", [0.0, 0.1, -0.1])
@pytest.mark.parametrize("p_b", [0.2, 0.5, 0.8])
def test_evidence_has_expectation_at_most_one_under_the_null(margin: float, p_b: float) -> None:
    n_a, n_b, p_a = 12, 30, p_b - margin
    probabilities = [
        math.comb(n_a, i) * p_a**i * (1 - p_a) ** (n_a - i) * math.comb(n_b, j) * p_b**j * (1 - p_b) ** (n_b - j)
        for i in range(n_a + 1)
        for j in range(n_b + 1)
    ]
    evidence_values = [math.exp(worse_evidence(i, n_a, j, n_b, margin)) for i in range(n_a + 1) for j in range(n_b + 1)]
    assert sum(probabilities) == pytest.approx(1)
    assert (
        0.01 < sum(probability * value for probability, value in zip(probabilities, evidence_values, strict=True)) <= 1
    )


# sequential tests


def _counts_at_tests(rng: np.random.Generator, chance: float, steps: np.ndarray) -> list[tuple[int, int]]:
    """Return (good, rated) at each test, with `steps` rated replies between two tests."""
    return list(zip(rng.binomial(steps, chance).cumsum().tolist(), steps.cumsum().tolist(), strict=True))


def _first_decision(
    config: CanaryConfig, p_candidate: float, p_stable: float, rng: np.random.Generator
) -> tuple[str, int]:
    """Return the first decision, made after each rated reply of the candidate, and the number of those replies."""
    rated = 1500
    stable_ratings = rng.geometric(config.share, rated) - 1
    arms = zip(
        _counts_at_tests(rng, p_candidate, np.ones(rated, int)),
        _counts_at_tests(rng, p_stable, stable_ratings),
        strict=True,
    )
    for (good, num_rated), (stable_good, num_stable_rated) in arms:
        stable = Arm(turns=num_stable_rated, rated=num_stable_rated, good=stable_good)
        action = decide(config, Arm(turns=num_rated, rated=num_rated, good=good), stable, 0).action
        if action != "wait":
            return action, num_rated
    return "wait", rated


def test_false_alarm_rate_over_500_tests_is_at_most_alpha() -> None:
    rng, config, runs = np.random.default_rng(3), CanaryConfig(alpha=0.2, min_rated=10**6), 60
    alarms = num_z_test_alarms = 0
    for _ in range(runs):
        candidate, stable = _counts_at_tests(rng, 0.8, np.full(500, 1)), _counts_at_tests(rng, 0.8, rng.poisson(9, 500))
        pairs = list(zip(candidate, stable, strict=True))
        alarms += any(
            decide(config, Arm(n, 0, n, good), Arm(m, 0, m, other), 0).action == "roll_back"
            for (good, n), (other, m) in pairs
        )
        num_z_test_alarms += any(_z_test(good, n, other, m) for (good, n), (other, m) in pairs[20:])
    assert num_z_test_alarms > 0.2 * runs, "a fixed-sample test has a higher false alarm rate when it is repeated"
    assert alarms <= 0.2 * runs


def _z_test(good: int, n: int, other: int, m: int) -> bool:
    pooled = (good + other) / (n + m)
    spread = math.sqrt(pooled * (1 - pooled) * (1 / n + 1 / m)) if 0 < pooled < 1 else math.inf
    return (other / m - good / n) / spread > 1.645


def test_wrong_promotion_rate_is_at_most_alpha() -> None:
    rng, config = np.random.default_rng(5), CanaryConfig(share=0.1, alpha=0.2, patience_seconds=1e9)
    outcomes = [_first_decision(config, 0.7, 0.8, rng)[0] for _ in range(30)]
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
    rng, config = np.random.default_rng(7), PATIENT.model_copy(update={"share": share})
    outcomes = [_first_decision(config, p_candidate, 0.8, rng) for _ in range(21)]
    assert [action for action, _ in outcomes].count(action) >= 20
    assert CONFIG.min_rated / 2 < median(rated for _, rated in outcomes) <= at_most


# decisions


def test_equal_candidate_is_promoted_with_a_reason() -> None:
    decision = decide(CONFIG, Arm(turns=500, failed=5, rated=200, good=180, mean_length=55.0), STABLE, 60)
    assert decision.action == "promote"
    assert "90% of 200 rated against 80% of 200 rated" in decision.reason
    assert decision.figures["approval"] == 0.9 and decision.figures["stable_approval"] == 0.8
    assert decision.figures["no_worse"] == worse_evidence(160, 200, 180, 200, -0.1) >= decision.figures["promote_at"]
    assert decision.figures["length_ratio"] == pytest.approx(1.1) and "latency_ratio" not in decision.figures


def test_no_promotion_before_enough_replies_and_ratings() -> None:
    preferred = Arm(turns=500, rated=200, good=180)
    assert decide(CONFIG, preferred, STABLE, 60).action == "promote"
    assert decide(CONFIG.model_copy(update={"min_rated": 201}), preferred, STABLE, 60).action == "wait"
    assert decide(CONFIG.model_copy(update={"min_turns": 501}), preferred, STABLE, 60).action == "wait"
    assert decide(CONFIG.model_copy(update={"margin": 0.0}), preferred, STABLE, 60).action == "wait"


def test_less_approval_rolls_back() -> None:
    decision = decide(CONFIG, Arm(turns=60, rated=30, good=9), STABLE, 60)
    assert decision.action == "roll_back"
    assert decision.reason == "less approval: 30% of 30 rated against 80% of 200 rated, confidence 0.995"
    assert (
        decision.figures["less_approval"]
        == worse_evidence(9, 30, 160, 200)
        >= math.log(200)
        == decision.figures["alarm_at"]
    )


def test_failing_candidate_is_rolled_back_after_few_turns() -> None:
    decisions = [decide(CONFIG, Arm(turns=n, failed=n), STABLE, 1) for n in range(12)]
    assert [decision.action for decision in decisions[:2]] == ["wait", "wait"]
    assert decisions[6].action == "roll_back" and "6 of 6 against 4 of 400" in decisions[6].reason
    assert decide(CONFIG, Arm(turns=6, failed=6), Arm(turns=100, failed=100), 1).action == "wait", (
        "both arms fail equally"
    )


def test_alarm_has_priority_over_approval() -> None:
    preferred = Arm(turns=500, failed=50, rated=200, good=190)
    assert decide(CONFIG, replace(preferred, failed=5), STABLE, 60).action == "promote"
    assert decide(CONFIG, preferred, STABLE, 60).action == "roll_back"


@pytest.mark.parametrize("length, fine", [(24.9, False), (25.0, True), (100.0, True), (100.1, False), (0.0, False)])
def test_length_change_rolls_back_after_enough_turns(length: float, fine: bool) -> None:
    candidate = Arm(turns=20, mean_length=length)
    decision = decide(CONFIG, candidate, STABLE, 60)
    assert decision.action == ("wait" if fine else "roll_back")
    assert fine or "times the length" in decision.reason
    assert decide(CONFIG, replace(candidate, turns=19), STABLE, 60).action == "wait"
    assert decide(CONFIG, candidate, replace(STABLE, turns=19), 60).action == "wait"
    assert decide(CONFIG, candidate, replace(STABLE, mean_length=None), 60).action == "wait"
    assert decide(CONFIG, candidate, replace(STABLE, mean_length=0.0), 60).action == "wait"


def test_slower_candidate_is_rolled_back_and_a_faster_one_is_not() -> None:
    candidate = Arm(turns=20, seconds_per_token=0.041)
    assert "2.05 times as long" in decide(CONFIG, candidate, STABLE, 60).reason
    assert decide(CONFIG, candidate, STABLE, 60).action == "roll_back"
    assert decide(CONFIG, replace(candidate, turns=19), STABLE, 60).action == "wait"
    assert decide(CONFIG, replace(candidate, seconds_per_token=0.04), STABLE, 60).action == "wait"
    assert decide(CONFIG, replace(candidate, seconds_per_token=0.001), STABLE, 60).action == "wait"


@pytest.mark.parametrize(
    "candidate, stable",
    [
        (Arm(), Arm()),
        (Arm(), STABLE),
        (Arm(turns=500, rated=200, good=200), Arm()),
        (Arm(turns=500, failed=500), Arm()),
        (Arm(turns=500, rated=19, good=19), STABLE),
    ],
    ids=["no data", "no candidate data", "no stable data", "failures and no stable data", "too few ratings"],
)
def test_missing_ratings_wait_and_then_roll_back(candidate: Arm, stable: Arm) -> None:
    assert decide(CONFIG, candidate, stable, CONFIG.patience_seconds).action == "wait"
    late = decide(CONFIG, candidate, stable, CONFIG.patience_seconds + 1)
    assert late.action == "roll_back"
    assert late.reason.startswith("not enough data in 1801 s")
    assert f"{candidate.rated} of 20 rated" in late.reason
    assert ("against nothing rated" in late.reason) is (stable.rated == 0)


@pytest.mark.parametrize(("good", "action"), [(17, "promote"), (14, "promote"), (13, "roll_back")])
def test_deadline_decides_on_the_data_if_there_is_enough(good: int, action: str) -> None:
    candidate = Arm(turns=25, rated=20, good=good)  # 0.85, 0.7 and 0.65, against 0.8 with a margin of 0.1
    assert decide(CONFIG, candidate, STABLE, CONFIG.patience_seconds).action == "wait"
    late = decide(CONFIG, candidate, STABLE, CONFIG.patience_seconds + 1)
    assert late.action == action
    assert ("no objection" in late.reason) is (action == "promote")
    assert decide(CONFIG, candidate, replace(STABLE, rated=19, good=15), 10**6).action == "roll_back"
    assert decide(CONFIG, replace(candidate, turns=19), STABLE, 10**6).action == "roll_back"


def test_evidence_counts_after_the_deadline() -> None:
    assert decide(CONFIG, Arm(turns=500, rated=200, good=180), STABLE, 10**6).action == "promote"


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
def test_invalid_settings_are_rejected(settings: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        CanaryConfig.model_validate(settings)
