"""How far raters are believed, by arithmetic alone: reliability, implausible thumbs, bursts, and near-duplicates.

A thumb is one bit, and most turns have one rater, so little can be known about anybody. What can be: whether they
agree with others about the same turn, whether they say "up" about as often as others do, and how loud they are.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

PRIOR = (3.5, 1.5)  # of agreeing and disagreeing: a newcomer is right in seven of ten, as if five words had shown it
ALARM = 1e-6  # small enough for a thousand raters who are looked at a thousand times: one false alarm, if that
CROWD_WORDS = 100  # others' words that must be known before anybody is compared with them
PAGE_WORDS = 5  # of one rater, on one page, that shape what "the others say"; so that nobody is the crowd
HALF_LIFE = 1000  # words after which what the crowd said counts half
BURST = 4.0  # times as loud as the others is nobody's sin
BURST_RATERS = 8  # others who must have spoken on a page before anybody is loud
SHINGLE = 4
BANDS = 8


class Tally(NamedTuple):
    """What one rater has said: rewards above and below 0, and the weight of those that others (dis)agreed with.

    Example: Tally(up=12, down=3, agreed=2.5, disagreed=0.4)
    """

    up: float
    down: float
    agreed: float = 0.0
    disagreed: float = 0.0

    @property
    def words(self) -> float:
        return self.up + self.down


class RaterSignal(NamedTuple):
    """A word about a turn, beside others about the same turn. `weight` is how far its author is believed, from 0 to 1;
    a machine's word has no rater; `fresh` if it has not been compared before."""

    rater: str | None
    value: float
    weight: float = 1.0
    fresh: bool = True


def reliability(agreed: float, disagreed: float) -> float:
    """The mean of the Beta posterior of "agrees with the others": (α + agreed) / (α + β + agreed + disagreed).

    Dawid & Skene (1979) with one coin a rater, whose errors are the same on both sides; the labels of the others
    stand in for the unknown truth, weighted by how far they are believed, so it is one step of their EM and no more.
    """
    return (PRIOR[0] + agreed) / (sum(PRIOR) + agreed + disagreed)


def weight(agreed: float, disagreed: float) -> float:
    """2·reliability − 1, and nothing below 0: somebody who is right half of the time is a coin.

    Example: weight(0, 0) -> 0.4; weight(20, 0) -> 0.88; weight(0, 2) -> 0.0
    """
    alpha, beta = PRIOR
    return max(0.0, (alpha + agreed - beta - disagreed) / (alpha + beta + agreed + disagreed))


def allowance(most: int, belief: float) -> int:
    """Of the `most` samples that a batch takes of one rater, those for one who is believed so far; a newcomer has one
    where somebody beyond doubt has four.

    Example: allowance(4, 0.4) -> 1; allowance(4, 1.0) -> 4
    """
    return max(1, math.floor(most * belief))


def tail(count: float, trials: float, share: float) -> float:
    """A bound of the chance that a binomial is as far from `share` as count of trials, on the side where it is.

    Chernoff (1952), Hoeffding (1963): P ≤ exp(−n · KL(k/n ‖ p)), the Bernoulli KL. It needs no whole numbers, and is a
    few times above the exact tail, which is the careful side.
    """
    if trials <= 0:
        return 1.0
    seen = count / trials
    divergence = 0.0
    for observed, expected in ((seen, share), (1.0 - seen, 1.0 - share)):
        if observed > 0:
            divergence += observed * math.log(observed / expected) if expected > 0 else math.inf
    return math.exp(-trials * divergence)


def crowd_shares(all_time: Tally, lately: Tally, mine: Tally) -> tuple[float, ...]:
    """How often the others say "up": ever, without the rater's own words, and lately. None while they are too few.

    There are two because the policy gets better while raters come and go: whoever spoke early met worse replies.
    """
    others = Tally(max(0.0, all_time.up - mine.up), max(0.0, all_time.down - mine.down))
    return tuple(
        tally.up / tally.words for tally in (others, lately) if others.words >= CROWD_WORDS and tally.words > 0
    )


def one_sided(mine: Tally, shares: Sequence[float]) -> str | None:
    """Why the rater's share of "up" is no matter of luck, None if it may be. It must be unlikely at every share."""
    if not shares or not mine.words:
        return None
    own = mine.up / mine.words
    nearest = min(shares) if own < min(shares) else max(shares) if own > max(shares) else own
    if tail(mine.up, mine.words, nearest) >= ALARM:
        return None
    return f"says up to {own:.0%} of {mine.words:.0f}, where others do to {nearest:.0%}"


def contrary(mine: Tally) -> str | None:
    """Why the rater agrees with others less often than a coin would, None if it may be chance."""
    compared = mine.agreed + mine.disagreed
    if mine.agreed >= mine.disagreed or tail(mine.agreed, compared, 0.5) >= ALARM:
        return None
    return f"agrees with others in {mine.agreed:.1f} of {compared:.1f} comparisons"


def burst(name: str, counts: Mapping[str, int]) -> str | None:
    """Why so many words at once are no chance, given how many each rater had on this page; None if they may be.

    The others' mean times BURST is what a loud one may say; beyond it the Poisson tail, P(X ≥ k) ≤ e^−λ (eλ/k)^k.
    """
    others = [count for other, count in counts.items() if other != name]
    if len(others) < BURST_RATERS:
        return None
    mean, own = sum(others) / len(others), counts[name]
    expected = BURST * mean
    if own <= expected or own * (1.0 + math.log(expected / own)) - expected > math.log(ALARM):
        return None
    return f"{own} words at once, where others have {mean:.1f}"


def voices(said: Mapping[str, Tally], silent: Collection[str] = ()) -> Tally:
    """What one page adds to the crowd: at most PAGE_WORDS up and down a rater, nothing of those who are held back."""
    heard = [tally for name, tally in said.items() if name not in silent]
    return Tally(sum(min(t.up, PAGE_WORDS) for t in heard), sum(min(t.down, PAGE_WORDS) for t in heard))


def faded(lately: Tally, page: Tally) -> Tally:
    """What the crowd says lately, with a page more."""
    kept = fade(page)
    return Tally(lately.up * kept + page.up, lately.down * kept + page.down)


def fade(page: Tally) -> float:
    return float(0.5 ** (page.words / HALF_LIFE))


def agreement(turn: Sequence[RaterSignal]) -> dict[str, tuple[float, float]]:
    """What the words about one turn add to each rater's (agreed, disagreed): at most 1 a fresh word.

    Two words compare by their signs, as much as the weaker of them says and as the other's author is believed. Words
    that were both compared before are left out, so that a late third does not count the first two twice.
    """
    gained: dict[str, tuple[float, float]] = {}
    for mine in turn:
        if mine.rater is None:
            continue
        pairs = [
            (other.weight * min(abs(mine.value), abs(other.value)), mine.value * other.value > 0)
            for other in turn
            if other is not mine and (mine.fresh or other.fresh) and (other.rater is None or other.rater != mine.rater)
        ]
        scale = 1.0 / max(1.0, sum(mass for mass, _ in pairs))
        agreed = scale * sum(mass for mass, alike in pairs if alike)
        disagreed = scale * sum(mass for mass, alike in pairs if not alike)
        if agreed or disagreed:
            before = gained.get(mine.rater, (0.0, 0.0))
            gained[mine.rater] = (before[0] + agreed, before[1] + disagreed)
    return gained


def signature(prompt_ids: Sequence[int], output_ids: Sequence[int]) -> str:
    """32 hex digits, the same for turns whose prompts and replies have almost the same runs of four tokens.

    MinHash (Broder, 1997), one permutation in BANDS bins (Li, Owen & Zhang, 2012): the least hash of each bin, hashed
    together. Prompt and reply have a half of the digits each. A text in which a share J of runs is kept has the same
    half with a chance of about J^8: 0.92 at J = 0.99, 0.66 at 0.95, 0.17 at 0.8. So it finds copies and all but
    copies, and a paraphrase is another text to it.
    """
    return _half(prompt_ids) + _half(output_ids)


def _half(ids: Sequence[int]) -> str:
    least = [b"\xff" * 8] * BANDS
    for start in range(max(1, len(ids) - SHINGLE + 1)):
        run = b"".join(int(id).to_bytes(8, "little") for id in ids[start : start + SHINGLE])
        hashed = blake2b(run, digest_size=9).digest()
        band = hashed[8] % BANDS
        least[band] = min(least[band], hashed[:8])
    return blake2b(b"".join(least), digest_size=8).hexdigest()
