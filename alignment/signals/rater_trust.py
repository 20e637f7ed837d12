"""Rater trust: reliability, implausible feedback, bursts and near-duplicates.

Binary feedback is one bit, and most turns have one rater, so little is known about a rater. Three things can be
measured: whether raters agree with others about the same turn, whether their share of positive feedback is like that
of others, and how much feedback they give at once.
"""

import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import NamedTuple

from alignment.tolerance import sign

# Pseudo-counts (agreed, disagreed): a new rater is right in seven of ten, with the weight of five observations.
PRIOR = (3.5, 1.5)
ALARM_PROBABILITY = 1e-6  # for a thousand raters tested a thousand times: about one false alarm
MIN_CROWD_FEEDBACK = 100  # feedback of others that must exist before a rater is compared with them
MAX_PER_RATER_AND_PAGE = 5  # so that no single rater dominates the crowd
HALF_LIFE = 1000  # pieces of feedback after which older ones count half
BURST_FACTOR = 4.0  # times the others' mean is still plausible
MIN_BURST_RATERS = 8  # other raters on a page that a burst test needs
ROUNDING = 1e-9  # of sums of weights
SHINGLE = 4
BANDS = 8


class RaterCounts(NamedTuple):
    """One rater's feedback: the number of rewards above and below 0, and the weight of others' (dis)agreement.

    Example: RaterCounts(up=12, down=3, agreed=2.5, disagreed=0.4)
    """

    up: float
    down: float
    agreed: float = 0.0
    disagreed: float = 0.0

    @property
    def total(self) -> float:
        return self.up + self.down


class RaterSignal(NamedTuple):
    """One reward of a turn that has several.

    `weight` is the trust in its rater, from 0 to 1. An automated reward has no rater. `fresh` means that it was not
    compared before.
    """

    rater: str | None
    value: float
    weight: float = 1.0
    fresh: bool = True


def reliability(agreed: float, disagreed: float) -> float:
    """Return the mean of the Beta posterior of "agrees with others": (α + agreed) / (α + β + agreed + disagreed).

    Dawid & Skene (1979) with one symmetric error rate per rater. The labels of the others, weighted by trust, replace
    the unknown truth, so this is one step of their EM algorithm.
    """
    return (PRIOR[0] + agreed) / (sum(PRIOR) + agreed + disagreed)


def rater_weight(agreed: float, disagreed: float) -> float:
    """Return max(0, 2·reliability − 1): a rater who is right half of the time has weight 0.

    Example: rater_weight(0, 0) -> 0.4; rater_weight(20, 0) -> 0.88; rater_weight(0, 2) -> 0.0
    """
    alpha, beta = PRIOR
    return max(0.0, (alpha + agreed - beta - disagreed) / (alpha + beta + agreed + disagreed))


def tail_probability(count: float, trials: float, share: float) -> float:
    """Return a bound of the probability that a binomial deviates from `share` at minimum as far as count / trials.

    Chernoff (1952), Hoeffding (1963): P ≤ exp(−n · KL(k/n ‖ p)), the Bernoulli KL. The counts may be fractional. The
    bound is a few times the exact tail, so tests with it are conservative.
    """
    if trials <= 0:
        return 1.0
    rate = count / trials
    divergence = 0.0
    for observed, expected in ((rate, share), (1.0 - rate, 1.0 - share)):
        if observed > 0:
            divergence += observed * math.log(observed / expected) if expected > 0 else math.inf
    return math.exp(-trials * divergence)


def others_positive_rates(all_time: RaterCounts, recent: RaterCounts, own: RaterCounts) -> tuple[float, ...]:
    """Return the shares of positive feedback of others: of all time, without the rater's own, and recent.

    A share is left out while there is too little feedback. There are two because the policy improves over time: early
    raters saw worse replies.
    """
    others = RaterCounts(max(0.0, all_time.up - own.up), max(0.0, all_time.down - own.down))
    return tuple(
        counts.up / counts.total
        for counts in (others, recent)
        if others.total >= MIN_CROWD_FEEDBACK and counts.total > 0
    )


def detect_one_sided(own: RaterCounts, shares: Sequence[float]) -> str | None:
    """Return why the rater's share of positive feedback cannot be chance, None if it can.

    It must be improbable under every share of `shares`.
    """
    if not shares or not own.total:
        return None
    share = own.up / own.total
    nearest = min(shares) if share < min(shares) else max(shares) if share > max(shares) else share
    if tail_probability(own.up, own.total, nearest) >= ALARM_PROBABILITY:
        return None
    return f"rates {share:.0%} of {own.total:.0f} positive, others rate {nearest:.0%} positive"


def detect_contrary(own: RaterCounts) -> str | None:
    """Return why the rater disagrees with others more often than chance explains, None if chance explains it."""
    comparisons = own.agreed + own.disagreed
    if own.agreed >= own.disagreed or tail_probability(own.agreed, comparisons, 0.5) >= ALARM_PROBABILITY:
        return None
    return f"agrees with others in {own.agreed:.1f} of {comparisons:.1f} comparisons"


def detect_burst(name: str, counts: Mapping[str, int]) -> str | None:
    """Return why a rater's count on this page is too high to be chance, None if it can be chance.

    The expected count λ is the others' mean times BURST_FACTOR; the test is the Poisson tail, P(X ≥ k) ≤ e^−λ (eλ/k)^k.
    """
    others = [count for other, count in counts.items() if other != name]
    if len(others) < MIN_BURST_RATERS:
        return None
    mean, own = sum(others) / len(others), counts[name]
    expected = BURST_FACTOR * mean
    if own <= expected or own * (1.0 + math.log(expected / own)) - expected > math.log(ALARM_PROBABILITY):
        return None
    return f"{own} pieces of feedback at once, others gave {mean:.1f} on average"


def sum_page_counts(counts: Mapping[str, RaterCounts], excluded: Collection[str] = ()) -> RaterCounts:
    """Return what one page adds to the crowd's counts: those of all raters but `excluded`, capped for each rater."""
    included = [rater for name, rater in counts.items() if name not in excluded]
    return RaterCounts(
        sum(min(rater.up, MAX_PER_RATER_AND_PAGE) for rater in included),
        sum(min(rater.down, MAX_PER_RATER_AND_PAGE) for rater in included),
    )


def decay_factor(page: RaterCounts) -> float:
    """Return the factor by which one more page reduces the recent counts of the crowd."""
    return float(0.5 ** (page.total / HALF_LIFE))


def count_agreement(turn: Sequence[RaterSignal]) -> dict[str, tuple[float, float]]:
    """Return what the feedback on one turn adds to each rater's (agreed, disagreed): at most 1 per fresh signal.

    Two signals agree if they have the same sign. The comparison weighs the smaller absolute value times the weight of
    the other rater. Two signals that were both compared before are skipped, so a late third one does not count them
    twice.

    The work grows with n log n: a reply may have very many signals, and each new one is compared with all of them.
    """
    compared = [signal for signal in turn if sign(signal.value)]
    of_rater: dict[str, list[RaterSignal]] = {}
    for signal in compared:
        if signal.rater is not None:
            of_rater.setdefault(signal.rater, []).append(signal)
    of_all = _SignalMasses(compared)
    additions: dict[str, tuple[float, float]] = {}
    for rater, signals in of_rater.items():
        own = _SignalMasses(signals)  # nobody is compared with themselves
        for signal in signals:
            agreed, disagreed = (
                _without_rounding(of_all.mass(signal, direction) - own.mass(signal, direction))
                for direction in (sign(signal.value), -sign(signal.value))
            )
            scale = 1.0 / max(1.0, agreed + disagreed)
            if agreed or disagreed:
                before = additions.get(rater, (0.0, 0.0))
                additions[rater] = (before[0] + scale * agreed, before[1] + scale * disagreed)
    return additions


class _SignalMasses:
    """Sums of weight · min(|value|, |other value|) over signals, each in O(log n)."""

    def __init__(self, signals: Sequence[RaterSignal]) -> None:
        self._sums = {
            (direction, fresh_only): _ClippedSums(
                (abs(signal.value), signal.weight)
                for signal in signals
                if sign(signal.value) == direction and (signal.fresh or not fresh_only)
            )
            for direction in (1, -1)
            for fresh_only in (False, True)
        }

    def mass(self, own: RaterSignal, direction: int) -> float:
        """Return the sum over the signals in this direction that `own` is compared with."""
        return self._sums[direction, not own.fresh].clipped_sum(abs(own.value))


class _ClippedSums:
    """Sums of weight · min(size, limit) over (size, weight) pairs."""

    def __init__(self, pairs: Iterable[tuple[float, float]]) -> None:
        ordered = sorted(pairs)
        self._sizes = [size for size, _ in ordered]
        self._weights = [0.0, *accumulate(weight for _, weight in ordered)]
        self._products = [0.0, *accumulate(size * weight for size, weight in ordered)]

    def clipped_sum(self, limit: float) -> float:
        below = bisect_right(self._sizes, limit)
        return self._products[below] + limit * (self._weights[-1] - self._weights[below])


def _without_rounding(mass: float) -> float:
    """Return the difference of two sums, which is not exactly 0 where they are equal."""
    return mass if mass > ROUNDING else 0.0


def minhash_signature(prompt_ids: Sequence[int], output_ids: Sequence[int]) -> str:
    """Return 32 hex digits that are equal for turns with almost the same four-token shingles in prompt and reply.

    MinHash (Broder, 1997), one permutation in BANDS bins (Li, Owen & Zhang, 2012): the smallest hash of each bin,
    hashed together. Prompt and reply take half of the digits each. Two texts with Jaccard similarity J have the same
    half with probability about J^8: 0.92 at J = 0.99, 0.66 at 0.95, 0.17 at 0.8. So it finds near-copies, but no
    paraphrases.
    """
    return _sketch(prompt_ids) + _sketch(output_ids)


def _sketch(ids: Sequence[int]) -> str:
    minimum = [b"\xff" * 8] * BANDS
    for start in range(max(1, len(ids) - SHINGLE + 1)):
        shingle = b"".join(int(id).to_bytes(8, "little") for id in ids[start : start + SHINGLE])
        hashed = blake2b(shingle, digest_size=9).digest()
        band = hashed[8] % BANDS
        minimum[band] = min(minimum[band], hashed[:8])
    return blake2b(b"".join(minimum), digest_size=8).hexdigest()
