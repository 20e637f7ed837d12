"""The trust in raters, worked out by hand."""

import math
import random
from collections.abc import Iterator

import pytest

from alignment.signals import rater_trust
from alignment.signals.rater_trust import RaterCounts, RaterSignal
from tests.support.rater_trust import decay_counts, sample_quota


def test_new_rater_has_a_small_weight_and_a_random_rater_none() -> None:
    assert rater_trust.reliability(0, 0) == pytest.approx(3.5 / 5)
    assert rater_trust.rater_weight(0, 0) == pytest.approx(0.4)
    assert rater_trust.rater_weight(15, 0) == pytest.approx(2 * 18.5 / 20 - 1)
    assert rater_trust.rater_weight(0, 2) == 0.0, "a reliability of 3.5 / 7 is chance"
    assert rater_trust.rater_weight(0, 50) == 0.0, "a reliability below chance gets no negative weight"


def test_sample_quota_grows_with_trust() -> None:
    assert [sample_quota(4, belief) for belief in (0.0, 0.4, 0.5, 0.8, 1.0)] == [1, 1, 2, 3, 4]


def test_tail_bound_is_slightly_above_the_exact_binomial_tail() -> None:
    exact = sum(math.comb(20, k) * 0.6**k * 0.4 ** (20 - k) for k in range(4))
    assert exact < rater_trust.tail_probability(3, 20, 0.6) < 10 * exact
    assert rater_trust.tail_probability(12, 20, 0.6) == pytest.approx(1.0), "12 of 20 is the expected count"
    assert rater_trust.tail_probability(0, 10, 0.5) == pytest.approx(0.5**10)
    assert rater_trust.tail_probability(1, 10, 0.0) == 0.0 and rater_trust.tail_probability(0, 0, 0.5) == 1.0


def test_rater_with_mostly_negative_feedback_is_one_sided_after_enough_feedback() -> None:
    assert rater_trust.detect_one_sided(RaterCounts(1, 9), [0.6]) is None
    assert (
        rater_trust.detect_one_sided(RaterCounts(2, 38), [0.6]) == "rates 5% of 40 positive, others rate 60% positive"
    )
    assert rater_trust.detect_one_sided(RaterCounts(40, 0), [0.5]) is not None
    assert rater_trust.detect_one_sided(RaterCounts(24, 16), [0.6]) is None


def test_early_rater_is_compared_with_the_nearest_share() -> None:
    counts = RaterCounts(14, 26)  # 35 % positive, as the other raters were at that time
    assert rater_trust.detect_one_sided(counts, [0.9]) is not None
    assert rater_trust.detect_one_sided(counts, [0.4, 0.9]) is None


def test_small_groups_and_own_feedback_are_excluded_from_comparison() -> None:
    assert rater_trust.others_positive_rates(RaterCounts(40, 40), RaterCounts(30, 30), RaterCounts(0, 0)) == ()
    assert rater_trust.others_positive_rates(RaterCounts(150, 150), RaterCounts(30, 60), RaterCounts(100, 0)) == (
        50 / 200,
        1 / 3,
    )


def test_false_alarms_are_rare_over_many_tests() -> None:
    """100 honest raters are tested after each of 200 labels. At 1e-6 per test, 2 % of such groups have an alarm."""
    draw = random.Random(7)
    for _ in range(100):
        up = 0
        for total in range(1, 201):
            up += draw.random() < 0.7
            assert rater_trust.detect_one_sided(RaterCounts(up, total - up), [0.7]) is None


def test_rater_who_mostly_disagrees_is_contrary() -> None:
    assert rater_trust.detect_contrary(RaterCounts(0, 0, agreed=2, disagreed=6)) is None
    assert (
        rater_trust.detect_contrary(RaterCounts(0, 0, agreed=2, disagreed=40))
        == "agrees with others in 2.0 of 42.0 comparisons"
    )
    assert rater_trust.detect_contrary(RaterCounts(0, 0, agreed=40, disagreed=2)) is None


def test_burst_is_one_rater_far_above_the_others() -> None:
    page = {f"HUMAN/{number}": 1 for number in range(20)}
    assert rater_trust.detect_burst("HUMAN/frequent", page | {"HUMAN/frequent": 12}) is None
    assert (
        rater_trust.detect_burst("HUMAN/frequent", page | {"HUMAN/frequent": 40})
        == "40 pieces of feedback at once, others gave 1.0 on average"
    )
    assert rater_trust.detect_burst("HUMAN/0", page | {"HUMAN/frequent": 40}) is None
    assert rater_trust.detect_burst("HUMAN/frequent", {"HUMAN/frequent": 400, "HUMAN/0": 1}) is None, (
        "with few other raters there is no burst"
    )


def test_one_rater_cannot_dominate_the_page_counts() -> None:
    counts = {
        "HUMAN/frequent": RaterCounts(300, 0),
        "HUMAN/1": RaterCounts(1, 2),
        "HUMAN/quarantined": RaterCounts(0, 3),
    }
    assert rater_trust.sum_page_counts(counts, {"HUMAN/quarantined"}) == RaterCounts(6, 2)


def test_recent_counts_halve_after_a_thousand_pieces_of_feedback() -> None:
    assert decay_counts(RaterCounts(100, 50), RaterCounts(600, 400)) == RaterCounts(650, 425)


def test_two_raters_agree_and_one_does_not() -> None:
    signals = [RaterSignal("a", 1.0), RaterSignal("b", 0.5), RaterSignal("c", -1.0)]
    agreement = rater_trust.count_agreement(signals)
    # a is compared with b (weight 0.5, agrees) and c (weight 1, disagrees): 0.5 / 1.5 and 1 / 1.5
    assert agreement["a"] == pytest.approx((1 / 3, 2 / 3))
    assert agreement["b"] == pytest.approx((0.5, 0.5))
    assert agreement["c"] == pytest.approx((0.0, 1.0))


def test_automated_rewards_count_by_weight_and_are_not_rated() -> None:
    assert rater_trust.count_agreement([RaterSignal("a", 1.0), RaterSignal(None, -1.0, weight=0.25)]) == {
        "a": (0.0, 0.25)
    }


def test_signals_are_compared_only_once() -> None:
    compared_before = [RaterSignal("a", 1.0, fresh=False), RaterSignal("b", -1.0, fresh=False)]
    assert rater_trust.count_agreement(compared_before) == {}
    with_third = rater_trust.count_agreement([*compared_before, RaterSignal(None, 1.0)])
    assert with_third == {"a": (1.0, 0.0), "b": (0.0, 1.0)}


def test_rater_is_not_compared_with_their_own_feedback() -> None:
    assert rater_trust.count_agreement([RaterSignal("a", 1.0), RaterSignal("a", 1.0)]) == {}


def compare_pairwise(turn: list[RaterSignal]) -> dict[str, tuple[float, float]]:
    """Return what `count_agreement` must, computed for each pair."""
    gains: dict[str, tuple[float, float]] = {}
    for own in turn:
        masses = {True: 0.0, False: 0.0}
        for other in turn:
            is_compared = (own.fresh or other.fresh) and (other.rater is None or other.rater != own.rater)
            if other is not own and own.rater is not None and own.value and other.value and is_compared:
                is_same = (own.value > 0) == (other.value > 0)
                masses[is_same] += other.weight * min(abs(own.value), abs(other.value))
        if own.rater is not None and any(masses.values()):
            scale = 1.0 / max(1.0, sum(masses.values()))
            agreed, disagreed = gains.get(own.rater, (0.0, 0.0))
            gains[own.rater] = (agreed + scale * masses[True], disagreed + scale * masses[False])
    return gains


@pytest.mark.parametrize("seed", range(20))
def test_agreement_is_that_of_all_pairs(seed: int) -> None:
    draw = random.Random(seed)
    values, weights = (-1.0, -0.5, 0.0, 0.25, 0.75, 1.0), (0.0, 0.1, 0.5, 1.0)
    turn = [
        RaterSignal(
            draw.choice(["a", "b", "c", None, f"person-{number}"]),
            draw.choice(values) if draw.random() < 0.7 else draw.uniform(-1, 1),
            draw.choice(weights),
            fresh=draw.random() < draw.choice([0.1, 0.9]),
        )
        for number in range(draw.randrange(40))
    ]
    agreement, expected = rater_trust.count_agreement(turn), compare_pairwise(turn)
    assert agreement.keys() == expected.keys()
    for name, gains in expected.items():
        assert agreement[name] == pytest.approx(gains, abs=1e-9)


class CountedSignals(list[RaterSignal]):
    """Signals that count how often one is read."""

    num_read = 0

    def __iter__(self) -> Iterator[RaterSignal]:
        for signal in super().__iter__():
            self.num_read += 1
            yield signal


def test_a_vote_on_a_reply_with_many_is_not_compared_pair_by_pair() -> None:
    turn = CountedSignals(RaterSignal(f"person-{number}", 1.0, 0.5, fresh=number == 0) for number in range(1000))
    agreement = rater_trust.count_agreement(turn)
    assert len(agreement) == 1000 and agreement["person-0"] == (1.0, 0.0)
    assert turn.num_read <= 10 * len(turn)


def test_near_duplicates_share_a_signature() -> None:
    draw = random.Random(3)
    text = [draw.randrange(30_000) for _ in range(400)]
    copies = [[*text[:position], draw.randrange(30_000), *text[position + 1 :]] for position in range(5, 400, 8)]
    signature = rater_trust.minhash_signature(text, text)
    assert len(signature) == 32 and signature == rater_trust.minhash_signature(tuple(text), tuple(text))
    share_equal = sum(rater_trust.minhash_signature(text, copy) == signature for copy in copies) / len(copies)
    assert share_equal > 0.7, "one token of 400 changes four of 397 runs: J = 0.98, and 0.98^8 = 0.85"
    others = {rater_trust.minhash_signature(text, [draw.randrange(30_000) for _ in range(400)]) for _ in range(50)}
    assert len(others) == 50 and signature not in others


def test_short_texts_have_a_signature() -> None:
    assert rater_trust.minhash_signature([], [5]) != rater_trust.minhash_signature([], [6])
    assert rater_trust.minhash_signature([1], [5]) == rater_trust.minhash_signature([1], [5])


def test_signature_is_stable() -> None:
    assert rater_trust.minhash_signature([1, 2, 3, 4, 5], [6, 7]) == "96fe455af44f9696c6cbd24fa76921c9"
