"""Canary decisions: wait, promote or roll back, from counts of the candidate and of the stable version."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from alignment.config.frozen_model import Frozen
from alignment.signals.proportions import Share
from alignment.tolerance import exceeds

NUM_TESTS = 2  # tests that may raise a false alarm, approval and failures; they share alpha (Bonferroni)
BISECTION_STEPS = 48  # of an interval within [0, 1]: the result is exact to 1e-14

# "lapse" means rejected for lack of data.
Action = Literal["wait", "promote", "roll_back", "reject", "lapse"]


class Comparison(Frozen):
    """Limits for the comparison of a candidate with the serving version. Canary and shadow share them."""

    alpha: float = Field(
        0.01,
        gt=0,
        lt=0.5,
        description="error probability over all looks together: of an alarm for a candidate that is not worse, and of "
        "promoting one that is worse by more than the margin",
    )
    margin: float = Field(
        0.1, ge=0, lt=1, description="by how much the candidate's approval rate may be lower for it to go live"
    )
    min_turns: int = Field(
        20, ge=1, description="replies of the candidate before it may go live; of both before their ratios are checked"
    )
    patience_seconds: float = Field(
        1800.0, gt=0, description="the deadline: live if there is enough data and no objection, else rolled back"
    )
    max_length_ratio: float = Field(
        2.0, gt=1, description="largest ratio of mean reply lengths to the serving version, in either direction"
    )
    max_latency_ratio: float = Field(
        2.0, gt=1, description="largest ratio of the mean time per token to the serving version"
    )


class CanaryConfig(Comparison):
    """When a candidate goes live, and when it is rolled back.

    The duration depends on the number of ratings. Against a version of 80 % approval and without a deadline, an equal
    candidate went live after 460 rated replies of its own (90 % of runs: fewer than 760), one of 85 % after 180, one of
    90 % after 87; one of 40 % was rolled back after 26, one of 60 % after 107 (medians of 400 simulated runs). With a
    share of 0.05 the policy gets 9,200 ratings in that time. Where `patience_seconds` is too short for that, the data
    at the deadline decides, without that error bound, if there is enough of it.

    Example: CanaryConfig.model_validate({"share": 0.2, "patience_seconds": 86400})
    """

    share: float = Field(0.05, gt=0, lt=1, description="the share of conversations that the candidate answers")
    min_rated: int = Field(
        20, ge=1, description="rated replies of the candidate before it may go live; of both at the deadline"
    )


@dataclass(frozen=True)
class Arm:
    """Counts of one arm since the canary began.

    `failed` is the part of `turns` (at most one per end user) that failed; `good` is the part of `rated` (people, each
    once) whose votes are up more often than down; `mean_length` is in tokens.

    Example: Arm(turns=40, failed=1, rated=12, good=9, mean_length=52.0, seconds_per_token=0.02)
    """

    turns: int = 0
    failed: int = 0
    rated: int = 0
    good: int = 0
    mean_length: float | None = None
    seconds_per_token: float | None = None

    @property
    def approval(self) -> Share:
        return Share(self.good, self.rated)


@dataclass(frozen=True)
class Decision:
    """A decision. `reason` is for the audit log; `figures` are for display and leave out what is not known yet."""

    action: Action
    reason: str
    figures: Mapping[str, float]


def decide(config: CanaryConfig, candidate: Arm, stable: Arm, age_seconds: float) -> Decision:
    """Decide what to do with a candidate, `age_seconds` after it began to answer.

    May be called at any time, repeatedly. An alarm has priority. Approval and failures are tested by `worse_evidence`
    at half of `alpha` each, so both tests together are wrong about a candidate that is not worse in at most `alpha` of
    the canaries. The ratios of lengths and latencies are fixed bounds, not tests, and are not covered by `alpha`.
    Promotion before the deadline is one test at `alpha`. At the deadline, a candidate goes live if both arms have
    enough ratings and its approval rate is within the margin. A lack of ratings, of either arm, counts against it.
    """
    figures = compare_arms(config, candidate, stable) | {
        "less_approval": worse_evidence(candidate.good, candidate.rated, stable.good, stable.rated),
        "no_worse": worse_evidence(stable.good, stable.rated, candidate.good, candidate.rated, -config.margin),
    }
    if figures["less_approval"] >= figures["alarm_at"]:
        reason = f"less approval: {_approval(candidate)} against {_approval(stable)}, {confidence(config)}"
        return Decision("roll_back", reason, figures)
    if violation := guardrail_violation(config, candidate, stable, figures):
        return Decision("roll_back", violation, figures)
    evidence, required = figures["no_worse"], figures["promote_at"]
    details = (
        f"{_approval(candidate)} against {_approval(stable)}, "
        f"evidence of at most {config.margin:g} less is {evidence:.1f} of {required:.1f}"
    )
    if evidence >= required and candidate.turns >= config.min_turns and candidate.rated >= config.min_rated:
        return Decision("promote", f"enough approval: {details}", figures)
    counts = f"{candidate.turns} of {config.min_turns} replies, {candidate.rated} of {config.min_rated} rated"
    if age_seconds > config.patience_seconds:
        return _decide_at_deadline(config, candidate, stable, figures, f"in {age_seconds:.0f} s: {counts}; {details}")
    return Decision("wait", f"not decided after {age_seconds:.0f} s: {counts}; {details}", figures)


def worse_evidence(good_a: int, n_a: int, good_b: int, n_b: int, margin: float = 0.0) -> float:
    """Return the log evidence (nats) that a's approval probability is lower than b's by more than `margin`.

    log [ ∫∫ L(p_a, p_b) dp_a dp_b / sup { L(p_a, p_b) : p_a ≥ p_b − margin } ], L the likelihood of both streams.
    Relative to the true probabilities the mixture (numerator) is a martingale that starts at 1, and the supremum is at
    least their likelihood. So if a is not worse, the probability that this exceeds log(1/α) at any look is at most α,
    for any number of looks (Ville). Sequential universal inference: Wasserman, Ramdas & Balakrishnan (2020), with a
    mixture in the numerator instead of a plug-in estimate.

    The mirrored evidence, that p_a > p_b − margin, is worse_evidence(good_b, n_b, good_a, n_a, -margin).
    It assumes independent ratings and constant probabilities. With two equal versions and α = 0.005, 5 % were called
    worse when ratings came in identical groups of three, 39 % with groups of ten: so count each person once. Do not add
    counts from periods with different shares. The result is 0 where one arm has no ratings.

    Raises ValueError for impossible counts and for a margin outside (-1, 1).
    Example: worse_evidence(0, 2, 2, 2) is log(16/9): a mixture of 1/3 · 1/3 over the (1/2)⁴ of equal chances
    """
    if not (0 <= good_a <= n_a and 0 <= good_b <= n_b and -1 < margin < 1):
        raise ValueError(f"impossible counts or margin: {good_a} of {n_a}, {good_b} of {n_b}, {margin}")
    if not n_a or not n_b:
        return 0.0
    p_a, p_b = _constrained_mle(good_a, n_a, good_b, n_b, margin)
    mixture = _log_mixture(good_a, n_a) + _log_mixture(good_b, n_b)
    return mixture - _log_likelihood(good_a, n_a, p_a) - _log_likelihood(good_b, n_b, p_b)


def _constrained_mle(good_a: int, n_a: int, good_b: int, n_b: int, margin: float) -> tuple[float, float]:
    """Return the maximum-likelihood probabilities with p_a ≥ p_b − margin.

    If the observed shares violate the constraint, the maximum is on its boundary, p_a = p_b − margin, between them. The
    log-likelihood is concave there. Bisection finds the root of its slope, multiplied by a positive factor without
    poles.
    """
    p_a, p_b = good_a / n_a, good_b / n_b
    if p_a >= p_b - margin:
        return p_a, p_b
    low, high = max(0.0, p_a + margin), min(1.0 + margin, p_b)
    for _ in range(BISECTION_STEPS):
        p_b = (low + high) / 2
        p_a = p_b - margin
        rising = (good_a - n_a * p_a) * p_b * (1 - p_b) + (good_b - n_b * p_b) * p_a * (1 - p_a) > 0
        low, high = (p_b, high) if rising else (low, p_b)
    return p_a, p_b


def _log_mixture(good: int, n: int) -> float:
    """Return log ∫ p^good (1 − p)^(n − good) dp over [0, 1], the marginal likelihood under a uniform prior."""
    return math.lgamma(good + 1) + math.lgamma(n - good + 1) - math.lgamma(n + 2)


def _log_likelihood(good: int, n: int, p: float) -> float:
    """Return the log-likelihood, with 0 · log 0 = 0."""
    return (good * math.log(p) if good else 0.0) + ((n - good) * math.log1p(-p) if n > good else 0.0)


def compare_arms(config: Comparison, candidate: Arm, stable: Arm) -> dict[str, float]:
    """Return rates, ratios, the evidence of more failures, and the thresholds for evidence."""
    c, s = candidate, stable
    ratios = {
        "approval": c.approval.rate,
        "stable_approval": s.approval.rate,
        "failed": _ratio(c.failed, c.turns),
        "stable_failed": _ratio(s.failed, s.turns),
        "length_ratio": _ratio(c.mean_length, s.mean_length),
        "latency_ratio": _ratio(c.seconds_per_token, s.seconds_per_token),
    }
    return {name: figure for name, figure in ratios.items() if figure is not None} | {
        "more_failures": worse_evidence(c.turns - c.failed, c.turns, s.turns - s.failed, s.turns),
        "alarm_at": math.log(NUM_TESTS / config.alpha),
        "promote_at": math.log(1 / config.alpha),
    }


def confidence(config: Comparison) -> str:
    return f"confidence {1 - config.alpha / NUM_TESTS:.4g}"


def guardrail_violation(config: Comparison, candidate: Arm, stable: Arm, figures: Mapping[str, float]) -> str | None:
    """Return the violation of the limits on failures, lengths and latencies, None if there is none."""
    if figures["more_failures"] >= figures["alarm_at"]:
        return (
            f"more replies failed: {candidate.failed} of {candidate.turns} "
            f"against {stable.failed} of {stable.turns}, {confidence(config)}"
        )
    if min(candidate.turns, stable.turns) < config.min_turns:
        return None
    length, latency = figures.get("length_ratio"), figures.get("latency_ratio")
    if length is not None and not 1 / config.max_length_ratio <= length <= config.max_length_ratio:
        return (
            f"replies have {length:.2f} times the length of the serving version's, "
            f"not {1 / config.max_length_ratio:.2g} to {config.max_length_ratio:g} times"
        )
    if latency is not None and latency > config.max_latency_ratio:
        return (
            f"a token takes {latency:.2f} times as long as the serving version's, "
            f"more than {config.max_latency_ratio:g} times"
        )
    return None


def _decide_at_deadline(
    config: CanaryConfig, candidate: Arm, stable: Arm, figures: Mapping[str, float], details: str
) -> Decision:
    if candidate.turns < config.min_turns or min(candidate.rated, stable.rated) < config.min_rated:
        return Decision("roll_back", f"not enough data {details}", figures)
    deficit = (stable.approval.rate or 0.0) - (candidate.approval.rate or 0.0)
    if exceeds(deficit, config.margin):
        return Decision("roll_back", f"less approval than the margin allows {details}", figures)
    return Decision("promote", f"no objection {details}", figures)


def _approval(arm: Arm) -> str:
    rate = arm.approval.rate
    return "nothing rated" if rate is None else f"{rate:.0%} of {arm.rated} rated"


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
