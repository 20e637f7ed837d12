"""A new version answers people's prompts beside what serves, and nobody hears it: wait, go on or reject, from pairs."""

import math
from dataclasses import dataclass

from pydantic import Field

from alignment.config.rewards import JudgeSource, RewardsConfig
from alignment.config.rollouts import judges
from alignment.release.canary import Arm, Comparison, Verdict, compared, sure, unsound

SHADOW = "shadow_config"  # what a turn's share is drawn under


class ShadowConfig(Comparison):
    """Of which replies a candidate makes its own, and what they must show before anybody hears it.

    Example: RehearsalConfig.model_validate({"share": 0.2, "min_rated": 50})
    """

    share: float = Field(0.2, gt=0, le=1, description="of the replies of what serves, each beside one of the candidate")
    margin: float = Field(
        0.1, ge=0, lt=1, description="by which the share of pairs that it loses may exceed the share that it wins"
    )
    min_rated: int = Field(
        20, ge=0, description="pairs that were judged before it goes on; 0: lengths, failures and latencies are enough"
    )
    max_latency_ratio: float = Field(
        4.0,
        gt=1,
        description="times as long as in the chat that a token may take on average; the wait behind chats too",
    )
    tokens_per_hour: int = Field(100_000, ge=0, description="the most that shadow deployments may generate in an hour")
    window_seconds: float = Field(
        120.0, gt=0, le=7 * 86400, description="how long after a reply there may be room for the candidate's"
    )


@dataclass(frozen=True)
class Pairs:
    """Replies to one prompt, the candidate's judged beside the serving version's; each speaker once.

    Example: Pairs(better=12, alike=3, worse=9)
    """

    better: int = 0
    alike: int = 0
    worse: int = 0

    @property
    def rated(self) -> int:
        return self.better + self.alike + self.worse


def judge(config: ShadowConfig, candidate: Arm, stable: Arm, pairs: Pairs, age_seconds: float) -> Verdict:
    """What to do with a candidate, `age_seconds` after its shadow deployment began. May be asked at any time and again.

    As for a canary (`alignment.release.canary.judge`), but that approval is what became of the pairs, by `beaten`.
    """
    figures = compared(config, candidate, stable) | {
        "less_approval": beaten(pairs),
        "no_worse": unbeaten(pairs, config.margin),
    }
    told = f"better in {pairs.better} of {pairs.rated} pairs, worse in {pairs.worse}"
    if figures["less_approval"] >= figures["alarm_at"]:
        return Verdict("reject", f"less approval: {told}, {sure(config)}", figures)
    if alarm := unsound(config, candidate, stable, figures):
        return Verdict("reject", alarm, figures)
    shown, needed = figures["no_worse"], figures["promote_at"]
    enough = candidate.turns >= config.min_turns and pairs.rated >= config.min_rated
    heard = f"{told}, evidence of at most {config.margin:g} more is {shown:.1f} of {needed:.1f}"
    if enough and shown >= needed:
        return Verdict("promote", f"judged well enough: {heard}", figures)
    least = f"{candidate.turns} of {config.min_turns} replies, {pairs.rated} of {config.min_rated} rated"
    if age_seconds <= config.patience_seconds:
        return Verdict("wait", f"not decided after {age_seconds:.0f} s: {least}; {heard}", figures)
    told = f"in {age_seconds:.0f} s: {least}; {heard}"
    if not enough:
        return Verdict("lapse", f"not enough was heard {told}", figures)
    if pairs.worse - pairs.better > config.margin * pairs.rated:
        return Verdict("reject", f"less approval than the margin allows {told}", figures)
    return Verdict("promote", f"nothing spoke against it {told}", figures)


def beaten(pairs: Pairs) -> float:
    """Log evidence (nats) that the candidate loses more pairs than it wins.

    log [ ∫ L(p) dp / sup { L(p) : p_worse ≤ p_better } ], L the likelihood of (better, alike, worse) and the mixture
    uniform over all such chances: universal inference, as `alignment.release.canary.worse`. Two replies to one prompt are not
    independent; their comparison is one draw, whatever they have in common. 0 for no pairs.

    Example: beaten(Pairs(worse=2)) is log(1/6 / 1/4): a mixture of 1/6 over the (1/2)² of equal chances
    """
    return _evidence(pairs, 0.0, pairs.worse <= pairs.better)


def unbeaten(pairs: Pairs, margin: float) -> float:
    """Log evidence that p_worse is less than `margin` above p_better; likewise."""
    return _evidence(pairs, margin, pairs.worse - pairs.better >= margin * pairs.rated)


def rate(rewards: RewardsConfig) -> list[str]:
    """The sources that can judge both replies of a pair: none that people have to speak first for."""
    return [source.name for source in rewards.sources if judges(source) and source.weight > 0]


def compare(rewards: RewardsConfig) -> list[str]:
    """Those of them that are shown both replies at once."""
    return [source.name for source in rewards.sources if isinstance(source, JudgeSource) and source.compare]


def idle(config: ShadowConfig, rewards: RewardsConfig) -> str | None:
    """Why no shadow can be passed, if none can."""
    if config.tokens_per_hour == 0:
        return "tokens_per_hour is 0"
    if config.min_rated > 0 and not rate(rewards):
        return "no source of the policy's rewards judges a reply that nobody has seen, and min_rated is not 0"
    return None


def _evidence(pairs: Pairs, margin: float, unsurprising: bool) -> float:
    """Against all chances on one side of p_worse = p_better + margin. `unsurprising`: what was seen lies there."""
    n = pairs.rated
    mixture = math.lgamma(3) - math.lgamma(n + 3)
    mixture += sum(math.lgamma(count + 1) for count in (pairs.better, pairs.alike, pairs.worse))
    if unsurprising:
        likeliest = (pairs.better / n, pairs.alike / n, pairs.worse / n) if n else (1.0, 1.0, 1.0)
    else:
        likeliest = _edge(pairs, margin)
    return mixture - _log_likelihood(pairs, likeliest)


def _edge(pairs: Pairs, margin: float) -> tuple[float, float, float]:
    """The chances (p, 1 − margin − 2 p, p + margin) under which the counts are likeliest. The slope of the concave
    log-likelihood, without its poles, is −2 n p² + b p + better · margin · (1 − margin): p is its root above 0."""
    b = pairs.better * (1 - 3 * margin) - 2 * pairs.alike * margin + pairs.worse * (1 - margin)
    p = (b + math.sqrt(b * b + 8 * pairs.rated * pairs.better * margin * (1 - margin))) / (4 * pairs.rated)
    p = min(max(p, 0.0), (1 - margin) / 2)
    return p, max(1 - margin - 2 * p, 0.0), p + margin


def _log_likelihood(pairs: Pairs, chances: tuple[float, float, float]) -> float:
    """With 0 · log 0 = 0."""
    counts = (pairs.better, pairs.alike, pairs.worse)
    return sum(count * math.log(chance) for count, chance in zip(counts, chances, strict=True) if count)
