"""A new version beside the serving one, each answering its share: wait, promote or roll back, from counts alone."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from alignment.config.algorithm import Frozen

ALARMS = 2  # tests that may raise a false alarm, approval and failures; each gets its part of it (Bonferroni)
GRAIN = 1e-9  # two shares that differ by less are the same
HALVINGS = 48  # of an interval within [0, 1]: less than 1e-14 of it is left

# To lapse is to be rejected for what was not heard.
Action = Literal["wait", "promote", "roll_back", "reject", "lapse"]


class Comparison(Frozen):
    """What a candidate is held to beside what serves, wherever it answers."""

    alpha: float = Field(
        0.01,
        gt=0,
        lt=0.5,
        description="chance of an error, over all looks together: of an alarm about a candidate that is no worse, and "
        "of promoting one that is worse by more than the margin",
    )
    margin: float = Field(
        0.1, ge=0, lt=1, description="share of approval that a candidate may be worse by and still go live"
    )
    min_turns: int = Field(
        20, ge=1, description="replies of the candidate before it may go live; of both before ratios are looked at"
    )
    patience_seconds: float = Field(
        1800.0,
        gt=0,
        description="after so long it ends: live if enough was heard and nothing speaks against it, else taken back",
    )
    max_length_ratio: float = Field(
        2.0, gt=1, description="times as long, or as short, as the serving version's replies may be on average"
    )
    max_latency_ratio: float = Field(
        2.0, gt=1, description="times as long as the serving version that a token may take on average"
    )


class CanaryConfig(Comparison):
    """When a candidate goes live, and when it is taken back.

    How long that takes is a matter of ratings. Given the time, beside a version of 80 % approval, a candidate as
    good went live after 460 rated replies of its own (nine of ten runs after fewer than 760), one of 85 % after 180,
    one of 90 % after 87; one of 40 % was taken back after 26, one of 60 % after 107. Medians of 400 simulated runs. At
    a share of 0.05 the policy hears 9,200 ratings meanwhile. Where `patience_seconds` bring fewer, what was heard until
    then decides, without that certainty, provided it is enough.

    Example: CanaryConfig.model_validate({"share": 0.2, "patience_seconds": 86400})
    """

    share: float = Field(0.05, gt=0, lt=1, description="of the conversations that the candidate answers")
    min_rated: int = Field(
        20, ge=1, description="rated replies of the candidate before it may go live; of both when patience ends"
    )


@dataclass(frozen=True)
class Arm:
    """What is known of one side since the canary began. Of `turns` (at most one of each speaker's counts) the `failed`
    ones failed; `good` are of the `rated` (each rater once); lengths are tokens.

    Example: Arm(turns=40, failed=1, rated=12, good=9, mean_length=52.0, seconds_per_token=0.02)
    """

    turns: int = 0
    failed: int = 0
    rated: int = 0
    good: int = 0
    mean_length: float | None = None
    seconds_per_token: float | None = None


@dataclass(frozen=True)
class Verdict:
    """`reason` is for the audit log; `figures` are for people to look at, without those that nobody can know yet."""

    action: Action
    reason: str
    figures: Mapping[str, float]


def judge(config: CanaryConfig, candidate: Arm, stable: Arm, age_seconds: float) -> Verdict:
    """What to do with a candidate, `age_seconds` after it began to answer. May be asked at any time and again.

    An alarm goes before everything. Approval and failures are compared by `worse` at half of `alpha` each, so
    both together are wrong about a candidate that is no worse in at most `alpha` of the canaries. The ratios of
    lengths and latencies are bounds, not tests: they are outside of that promise. Promotion before patience ends is one
    test, at all of `alpha`. When it ends, a candidate goes live that both sides were heard enough of to compare, and
    that is not below the margin as it stands. Silence counts against it, whoever was silent.
    """
    figures = compared(config, candidate, stable) | {
        "less_approval": worse(candidate.good, candidate.rated, stable.good, stable.rated),
        "no_worse": worse(stable.good, stable.rated, candidate.good, candidate.rated, -config.margin),
    }
    if alarm := _alarm(config, candidate, stable, figures):
        return Verdict("roll_back", alarm, figures)
    shown, needed = figures["no_worse"], figures["promote_at"]
    heard = (
        f"{_approval(candidate)} against {_approval(stable)}, "
        f"evidence of at most {config.margin:g} less is {shown:.1f} of {needed:.1f}"
    )
    if shown >= needed and candidate.turns >= config.min_turns and candidate.rated >= config.min_rated:
        return Verdict("promote", f"approved of well enough: {heard}", figures)
    least = f"{candidate.turns} of {config.min_turns} replies, {candidate.rated} of {config.min_rated} rated"
    if age_seconds > config.patience_seconds:
        return _at_the_end(config, candidate, stable, figures, f"in {age_seconds:.0f} s: {least}; {heard}")
    return Verdict("wait", f"not decided after {age_seconds:.0f} s: {least}; {heard}", figures)


def worse(good_a: int, n_a: int, good_b: int, n_b: int, margin: float = 0.0) -> float:
    """Log evidence (nats) that a's chance of a good one is lower than b's by more than `margin`.

    log [ ∫∫ L(p_a, p_b) dp_a dp_b / sup { L(p_a, p_b) : p_a ≥ p_b − margin } ], L the likelihood of both streams.
    Against the true chances the mixture (numerator) is a martingale that starts at 1, and the supremum is no smaller
    than their likelihood. So if a is not worse, this exceeds log(1/α) at any of however many looks with a chance of
    at most α (Ville). Universal inference over time: Wasserman, Ramdas & Balakrishnan (2020), with a mixture in the
    numerator instead of an estimate from what came before.

    The mirror, that p_a > p_b − margin, is worse(good_b, n_b, good_a, n_a, -margin).
    It takes ratings as independent and each side's chance as constant. Of two equal versions, 5 % were called worse
    at α = 0.005 where ratings came in threes of one mind, 39 % where in tens: count a person's word once. Counts from
    times of different shares must not be added up. 0 where one side is empty: nothing is compared.

    Raises ValueError for counts that cannot be, and a margin outside (-1, 1).
    Example: worse(0, 2, 2, 2) is log(16/9): a mixture of 1/3 · 1/3 over the (1/2)⁴ of equal chances
    """
    if not (0 <= good_a <= n_a and 0 <= good_b <= n_b and -1 < margin < 1):
        raise ValueError(f"no such counts or margin: {good_a} of {n_a}, {good_b} of {n_b}, {margin}")
    if not n_a or not n_b:
        return 0.0
    p_a, p_b = _likeliest(good_a, n_a, good_b, n_b, margin)
    mixture = _log_mixture(good_a, n_a) + _log_mixture(good_b, n_b)
    return mixture - _log_likelihood(good_a, n_a, p_a) - _log_likelihood(good_b, n_b, p_b)


def _likeliest(good_a: int, n_a: int, good_b: int, n_b: int, margin: float) -> tuple[float, float]:
    """The chances with p_a ≥ p_b − margin under which the counts are likeliest.

    If the observed shares break that, the best lies on its edge, p_a = p_b − margin, between them. The log-likelihood
    is concave there; its slope, times what keeps its sign and has no pole, is halved down to its root.
    """
    p_a, p_b = good_a / n_a, good_b / n_b
    if p_a >= p_b - margin:
        return p_a, p_b
    low, high = max(0.0, p_a + margin), min(1.0 + margin, p_b)
    for _ in range(HALVINGS):
        p_b = (low + high) / 2
        p_a = p_b - margin
        rising = (good_a - n_a * p_a) * p_b * (1 - p_b) + (good_b - n_b * p_b) * p_a * (1 - p_a) > 0
        low, high = (p_b, high) if rising else (low, p_b)
    return p_a, p_b


def _log_mixture(good: int, n: int) -> float:
    """log ∫ p^good (1 − p)^(n − good) dp over [0, 1]: a uniform prior."""
    return math.lgamma(good + 1) + math.lgamma(n - good + 1) - math.lgamma(n + 2)


def _log_likelihood(good: int, n: int, p: float) -> float:
    """With 0 · log 0 = 0."""
    return (good * math.log(p) if good else 0.0) + ((n - good) * math.log1p(-p) if n > good else 0.0)


def compared(config: Comparison, candidate: Arm, stable: Arm) -> dict[str, float]:
    """The figures that need no word of anybody, and what evidence is measured by."""
    c, s = candidate, stable
    known = {
        "approval": _over(c.good, c.rated),
        "stable_approval": _over(s.good, s.rated),
        "failed": _over(c.failed, c.turns),
        "stable_failed": _over(s.failed, s.turns),
        "length_ratio": _over(c.mean_length, s.mean_length),
        "latency_ratio": _over(c.seconds_per_token, s.seconds_per_token),
    }
    return {name: figure for name, figure in known.items() if figure is not None} | {
        "more_failures": worse(c.turns - c.failed, c.turns, s.turns - s.failed, s.turns),
        "alarm_at": math.log(ALARMS / config.alpha),
        "promote_at": math.log(1 / config.alpha),
    }


def _alarm(config: CanaryConfig, candidate: Arm, stable: Arm, figures: Mapping[str, float]) -> str | None:
    """What speaks against the candidate, if anything does."""
    if figures["less_approval"] >= figures["alarm_at"]:
        return f"less approval: {_approval(candidate)} against {_approval(stable)}, {sure(config)}"
    return unsound(config, candidate, stable, figures)


def sure(config: Comparison) -> str:
    return f"sure to {1 - config.alpha / ALARMS:.4g}"


def unsound(config: Comparison, candidate: Arm, stable: Arm, figures: Mapping[str, float]) -> str | None:
    """Failures, lengths and latencies: what speaks against a candidate whatever is thought of its words."""
    if figures["more_failures"] >= figures["alarm_at"]:
        return (
            f"more replies failed: {candidate.failed} of {candidate.turns} "
            f"against {stable.failed} of {stable.turns}, {sure(config)}"
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


def _at_the_end(config: CanaryConfig, candidate: Arm, stable: Arm, figures: Mapping[str, float], told: str) -> Verdict:
    if candidate.turns < config.min_turns or min(candidate.rated, stable.rated) < config.min_rated:
        return Verdict("roll_back", f"not enough was heard {told}", figures)
    lag = stable.good / stable.rated - candidate.good / candidate.rated
    if lag > config.margin + GRAIN:
        return Verdict("roll_back", f"less approval than the margin allows {told}", figures)
    return Verdict("promote", f"nothing spoke against it {told}", figures)


def _approval(arm: Arm) -> str:
    return f"{arm.good / arm.rated:.0%} of {arm.rated} rated" if arm.rated else "nothing rated"


def _over(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
