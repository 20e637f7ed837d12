"""Shadow decisions: wait, promote or reject a candidate whose replies nobody sees, from judged pairs of replies."""

import math
from dataclasses import dataclass

from pydantic import Field

from alignment.config.rewards import JudgeSource, RewardsConfig
from alignment.release.canary import Arm, Comparison, Decision, compare_arms, confidence, guardrail_violation
from alignment.signals.combine_rewards import scores_unseen_replies

SHADOW = "shadow_config"  # the name under which a turn's share is drawn


class ShadowConfig(Comparison):
    """Which turns a candidate answers in the shadow, and what its replies must show before it serves users.

    Example: ShadowConfig.model_validate({"share": 0.2, "min_rated": 50})
    """

    share: float = Field(
        0.2, gt=0, le=1, description="the share of the serving version's turns that the candidate answers too"
    )
    margin: float = Field(
        0.1, ge=0, lt=1, description="by how much the share of lost pairs may exceed the share of won pairs"
    )
    min_rated: int = Field(
        20, ge=0, description="judged pairs before it is promoted; with 0, lengths, failures and latencies decide alone"
    )
    max_latency_ratio: float = Field(
        4.0, gt=1, description="largest ratio of the mean time per token to the chat; it includes waiting for chats"
    )
    tokens_per_hour: int = Field(100_000, ge=0, description="the most tokens that shadow replies may take in an hour")
    window_seconds: float = Field(
        120.0, gt=0, le=7 * 86400, description="how long after a reply the candidate's reply may be generated"
    )


@dataclass(frozen=True)
class PairCounts:
    """Counts of judged pairs: the candidate's reply against the serving version's, one pair per end user.

    Example: PairCounts(better=12, tied=3, worse=9)
    """

    better: int = 0
    tied: int = 0
    worse: int = 0

    @property
    def rated(self) -> int:
        return self.better + self.tied + self.worse


def decide(config: ShadowConfig, candidate: Arm, stable: Arm, pairs: PairCounts, age_seconds: float) -> Decision:
    """Decide what to do with a candidate, `age_seconds` after its shadow deployment began.

    May be called at any time, repeatedly. As for a canary (`alignment.release.canary.decide`), but the approval tests
    use the judged pairs, by `loss_evidence` and `noninferiority_evidence`.
    """
    figures = compare_arms(config, candidate, stable) | {
        "less_approval": loss_evidence(pairs),
        "no_worse": noninferiority_evidence(pairs, config.margin),
    }
    result = f"better in {pairs.better} of {pairs.rated} pairs, worse in {pairs.worse}"
    if figures["less_approval"] >= figures["alarm_at"]:
        return Decision("reject", f"less approval: {result}, {confidence(config)}", figures)
    if alarm := guardrail_violation(config, candidate, stable, figures):
        return Decision("reject", alarm, figures)
    evidence, required = figures["no_worse"], figures["promote_at"]
    has_enough_data = candidate.turns >= config.min_turns and pairs.rated >= config.min_rated
    details = f"{result}, evidence of at most {config.margin:g} more is {evidence:.1f} of {required:.1f}"
    if has_enough_data and evidence >= required:
        return Decision("promote", f"enough approval: {details}", figures)
    counts = f"{candidate.turns} of {config.min_turns} replies, {pairs.rated} of {config.min_rated} rated"
    if age_seconds <= config.patience_seconds:
        return Decision("wait", f"not decided after {age_seconds:.0f} s: {counts}; {details}", figures)
    summary = f"in {age_seconds:.0f} s: {counts}; {details}"
    if not has_enough_data:
        return Decision("lapse", f"not enough data {summary}", figures)
    if pairs.worse - pairs.better > config.margin * pairs.rated:
        return Decision("reject", f"less approval than the margin allows {summary}", figures)
    return Decision("promote", f"no objection {summary}", figures)


def loss_evidence(pairs: PairCounts) -> float:
    """Return the log evidence (nats) that the candidate loses more pairs than it wins. 0 without pairs.

    log [ ∫ L(p) dp / sup { L(p) : p_worse ≤ p_better } ], L the likelihood of (better, tied, worse) and the mixture
    uniform over all their probabilities: universal inference, as in `alignment.release.canary.worse_evidence`. Two
    replies to one prompt are not independent, but their comparison is one draw.

    Example: loss_evidence(PairCounts(worse=2)) is log(1/6 / 1/4): a mixture of 1/6 over (1/2)² of equal probabilities
    """
    return _evidence(pairs, 0.0, pairs.worse <= pairs.better)


def noninferiority_evidence(pairs: PairCounts, margin: float) -> float:
    """Return the log evidence (nats) that p_worse is less than p_better + `margin`. See `loss_evidence`."""
    return _evidence(pairs, margin, pairs.worse - pairs.better >= margin * pairs.rated)


def scoring_sources(rewards: RewardsConfig) -> list[str]:
    """Return the names of the sources that can score both replies of a pair, which no user has rated."""
    return [source.name for source in rewards.sources if scores_unseen_replies(source) and source.weight > 0]


def comparing_sources(rewards: RewardsConfig) -> list[str]:
    """Return the names of the judges that see both replies at once."""
    return [source.name for source in rewards.sources if isinstance(source, JudgeSource) and source.compare]


def disabled_reason(config: ShadowConfig, rewards: RewardsConfig) -> str | None:
    """Return why no shadow deployment can pass, None if it can."""
    if config.tokens_per_hour == 0:
        return "tokens_per_hour is 0"
    if config.min_rated > 0 and not scoring_sources(rewards):
        return "no reward source of the policy can score a reply that no user has seen, and min_rated is not 0"
    return None


def _evidence(pairs: PairCounts, margin: float, is_consistent: bool) -> float:
    """Return the evidence against all probabilities on one side of p_worse = p_better + margin.

    `is_consistent`: the observed shares are on that side.
    """
    n = pairs.rated
    mixture = math.lgamma(3) - math.lgamma(n + 3)
    mixture += sum(math.lgamma(count + 1) for count in (pairs.better, pairs.tied, pairs.worse))
    if is_consistent:
        mle = (pairs.better / n, pairs.tied / n, pairs.worse / n) if n else (1.0, 1.0, 1.0)
    else:
        mle = _boundary_mle(pairs, margin)
    return mixture - _log_likelihood(pairs, mle)


def _boundary_mle(pairs: PairCounts, margin: float) -> tuple[float, float, float]:
    """Return the maximum-likelihood probabilities of the form (p, 1 − margin − 2 p, p + margin).

    The slope of the concave log-likelihood, without its poles, is −2 n p² + b p + better · margin · (1 − margin); p is
    its positive root.
    """
    b = pairs.better * (1 - 3 * margin) - 2 * pairs.tied * margin + pairs.worse * (1 - margin)
    p = (b + math.sqrt(b * b + 8 * pairs.rated * pairs.better * margin * (1 - margin))) / (4 * pairs.rated)
    p = min(max(p, 0.0), (1 - margin) / 2)
    return p, max(1 - margin - 2 * p, 0.0), p + margin


def _log_likelihood(pairs: PairCounts, probabilities: tuple[float, float, float]) -> float:
    """Return the log-likelihood, with 0 · log 0 = 0."""
    counts = (pairs.better, pairs.tied, pairs.worse)
    return sum(count * math.log(probability) for count, probability in zip(counts, probabilities, strict=True) if count)
