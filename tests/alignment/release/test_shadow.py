"""Shadow decisions from counts."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from alignment.config.rewards import RewardsConfig
from alignment.release.canary import Arm
from alignment.release.shadow import (
    PairCounts,
    ShadowConfig,
    comparing_sources,
    decide,
    disabled_reason,
    loss_evidence,
    noninferiority_evidence,
    scoring_sources,
)

CONFIG = ShadowConfig()
STABLE = Arm(turns=400, failed=4, rated=200, good=160, mean_length=50.0, seconds_per_token=0.02)
CANDIDATE = replace(STABLE, turns=200, failed=2)
COUNTS = st.integers(0, 400)


def test_evidence_by_hand() -> None:
    # the mixture of one pair is 1/3, whatever its result; its likelihood is at most 1/2 under the null
    assert loss_evidence(PairCounts(worse=1)) == pytest.approx(math.log(1 / 3 / (1 / 2)))
    # ∫ p² = 1/6 over (1/2)²
    assert loss_evidence(PairCounts(worse=2)) == pytest.approx(math.log(1 / 6 / (1 / 4)))
    # a win: p_worse ≤ p_better allows the maximum, 1
    assert loss_evidence(PairCounts(better=1)) == pytest.approx(math.log(1 / 3))
    # p_worse = p_better + 1/2: p_better is 1/4 at most
    assert noninferiority_evidence(PairCounts(better=1), 0.5) == pytest.approx(math.log(1 / 3 / (1 / 4)))
    # the probability of a tie is 1/2 at most
    assert noninferiority_evidence(PairCounts(tied=1), 0.5) == pytest.approx(math.log(1 / 3 / (1 / 2)))
    assert noninferiority_evidence(PairCounts(worse=1), 0.5) == pytest.approx(math.log(1 / 3))


def test_no_pairs_are_no_evidence() -> None:
    assert loss_evidence(PairCounts()) == noninferiority_evidence(PairCounts(), 0.1) == 0.0


@given(COUNTS, COUNTS, COUNTS, st.floats(0, 0.9))
def test_boundary_mle_is_the_maximum(better: int, tied: int, worse: int, margin: float) -> None:
    """The closed form agrees with a fine grid of the probabilities on the boundary."""
    pairs = PairCounts(better, tied, worse)
    p = np.linspace(0, (1 - margin) / 2, 4001)
    with np.errstate(divide="ignore", invalid="ignore"):
        probabilities = ((better, p), (tied, np.maximum(1 - margin - 2 * p, 0)), (worse, p + margin))
        best = max(sum(count * np.log(probability) for count, probability in probabilities if count) + np.zeros_like(p))
    mixture = math.lgamma(3) - math.lgamma(pairs.rated + 3)
    mixture += sum(math.lgamma(count + 1) for count in (better, tied, worse))
    evidence = noninferiority_evidence(pairs, margin) if worse - better < margin * pairs.rated else None
    if margin == 0 and worse > better:
        evidence = loss_evidence(pairs)
    if evidence is not None:
        assert evidence <= mixture - best + 1e-9
        assert evidence == pytest.approx(mixture - best, abs=0.02)


def test_false_alarm_rate_over_all_looks_is_at_most_alpha() -> None:
    rng, alarms = np.random.default_rng(1), 0
    for _ in range(200):
        draws = np.cumsum(rng.multinomial(1, (0.3, 0.4, 0.3), size=400), axis=0)
        alarms += any(loss_evidence(PairCounts(*map(int, row))) >= math.log(1 / 0.05) for row in draws[::4])
    assert alarms <= 10, "5 % of the runs at most"


def test_wrong_promotion_rate_is_at_most_alpha() -> None:
    rng, promotions = np.random.default_rng(2), 0
    for _ in range(200):
        draws = np.cumsum(rng.multinomial(1, (0.3, 0.3, 0.4), size=400), axis=0)
        promotions += any(
            noninferiority_evidence(PairCounts(*map(int, row)), 0.1) >= math.log(1 / 0.05) for row in draws[::4]
        )
    assert promotions <= 10


@pytest.mark.parametrize(
    ("pairs", "age", "action", "reason"),
    [
        (PairCounts(), 1.0, "wait", "not decided after 1 s: 200 of 20 replies, 0 of 20 rated"),
        (
            PairCounts(10, 10, 60),
            1.0,
            "reject",
            "less approval: better in 10 of 80 pairs, worse in 60, confidence 0.995",
        ),
        (PairCounts(60, 10, 10), 1.0, "promote", "enough approval: better in 60 of 80 pairs, worse in 10"),
        (PairCounts(19, 0, 0), 1.0, "wait", "19 of 20 rated"),
        (PairCounts(19, 0, 0), 2000.0, "lapse", "not enough data in 2000 s"),
        (PairCounts(9, 12, 9), 2000.0, "promote", "no objection in 2000 s"),
        (PairCounts(8, 10, 12), 2000.0, "reject", "less approval than the margin allows in 2000 s"),
    ],
)
def test_decisions(pairs: PairCounts, age: float, action: str, reason: str) -> None:
    decision = decide(CONFIG, CANDIDATE, STABLE, pairs, age)
    assert decision.action == action and reason in decision.reason


def test_failures_and_lengths_reject_regardless_of_approval() -> None:
    preferred = PairCounts(better=60)
    failing = decide(CONFIG, replace(CANDIDATE, failed=40), STABLE, preferred, 1.0)
    assert failing.action == "reject" and "more replies failed: 40 of 200 against 4 of 400" in failing.reason
    long = decide(CONFIG, replace(CANDIDATE, mean_length=120.0), STABLE, preferred, 1.0)
    assert long.action == "reject" and "2.40 times the length" in long.reason
    slow = decide(CONFIG, replace(CANDIDATE, seconds_per_token=0.1), STABLE, preferred, 1.0)
    assert slow.action == "reject" and "a token takes 5.00 times as long" in slow.reason


def test_without_judges_guardrails_decide_at_the_deadline() -> None:
    config = ShadowConfig(min_rated=0)
    assert decide(config, CANDIDATE, STABLE, PairCounts(), 1.0).action == "wait"
    assert decide(config, CANDIDATE, STABLE, PairCounts(), 2000.0).action == "promote"
    assert decide(config, replace(CANDIDATE, turns=19), STABLE, PairCounts(), 2000.0).action == "lapse"


def test_scoring_sources_and_disabled_reason() -> None:
    judge = {"type": "judge", "name": "judge", "url": "https://judge.example", "model": "m", "compare": True}
    unweighted = {"type": "http", "name": "service", "url": "https://ours.example", "weight": 0}
    sources = [
        {"type": "explicit"},
        {"type": "next_turn"},
        judge,
        {"type": "rule", "name": "ended", "function": "ended"},
        unweighted,
    ]
    rewards = RewardsConfig.model_validate({"sources": sources})
    assert scoring_sources(rewards) == ["judge", "ended"] and comparing_sources(rewards) == ["judge"]
    assert disabled_reason(CONFIG, rewards) is None
    explicit_only = RewardsConfig()
    assert (
        "no reward source" in (disabled_reason(CONFIG, explicit_only) or "")
        and disabled_reason(ShadowConfig(min_rated=0), explicit_only) is None
    )
    assert disabled_reason(ShadowConfig(tokens_per_hour=0), rewards) == "tokens_per_hour is 0"


@pytest.mark.parametrize(
    "settings", [{"share": 0}, {"share": 1.1}, {"margin": 1}, {"min_turns": 0}, {"extra_replies": 1}]
)
def test_invalid_settings_are_rejected(settings: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        ShadowConfig.model_validate(settings)
