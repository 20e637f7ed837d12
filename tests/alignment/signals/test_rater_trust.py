"""How far raters are believed, worked out by hand."""

import math
import random

import pytest

from alignment.signals import rater_trust
from alignment.signals.rater_trust import RaterSignal, Tally


def test_a_newcomer_has_a_modest_voice_and_a_coin_has_none() -> None:
    assert rater_trust.reliability(0, 0) == pytest.approx(3.5 / 5)
    assert rater_trust.weight(0, 0) == pytest.approx(0.4)
    assert rater_trust.weight(15, 0) == pytest.approx(2 * 18.5 / 20 - 1)
    assert rater_trust.weight(0, 2) == 0.0, "3.5 of 7 is a coin"
    assert rater_trust.weight(0, 50) == 0.0, "and less than a coin is not listened to backwards"


def test_a_newcomer_has_one_sample_where_the_most_trusted_has_four() -> None:
    assert [rater_trust.allowance(4, belief) for belief in (0.0, 0.4, 0.5, 0.8, 1.0)] == [1, 1, 2, 3, 4]


def test_the_tail_is_above_the_binomial_and_not_far_above() -> None:
    exact = sum(math.comb(20, k) * 0.6**k * 0.4 ** (20 - k) for k in range(4))
    assert exact < rater_trust.tail(3, 20, 0.6) < 10 * exact
    assert rater_trust.tail(12, 20, 0.6) == pytest.approx(1.0), "just what is expected"
    assert rater_trust.tail(0, 10, 0.5) == pytest.approx(0.5**10)
    assert rater_trust.tail(1, 10, 0.0) == 0.0 and rater_trust.tail(0, 0, 0.5) == 1.0


def test_who_says_down_to_nearly_all_is_one_sided_once_there_is_enough_of_it() -> None:
    assert rater_trust.one_sided(Tally(1, 9), [0.6]) is None
    assert rater_trust.one_sided(Tally(2, 38), [0.6]) == "says up to 5% of 40, where others do to 60%"
    assert rater_trust.one_sided(Tally(40, 0), [0.5]) is not None
    assert rater_trust.one_sided(Tally(24, 16), [0.6]) is None


def test_who_spoke_when_replies_were_worse_is_measured_by_the_share_that_is_nearest() -> None:
    early = Tally(14, 26)  # 35 %, as everybody's was then
    assert rater_trust.one_sided(early, [0.9]) is not None
    assert rater_trust.one_sided(early, [0.4, 0.9]) is None


def test_nobody_is_compared_with_a_handful_nor_with_themselves() -> None:
    assert rater_trust.crowd_shares(Tally(40, 40), Tally(30, 30), Tally(0, 0)) == ()
    assert rater_trust.crowd_shares(Tally(150, 150), Tally(30, 60), Tally(100, 0)) == (50 / 200, 1 / 3)


def test_false_alarms_are_rare_over_a_long_life() -> None:
    """A hundred honest raters, looked at after each of 200 words: at 1e-6 a look, 2 % of such crowds see an alarm."""
    draw = random.Random(7)
    for _ in range(100):
        up = 0
        for words in range(1, 201):
            up += draw.random() < 0.7
            assert rater_trust.one_sided(Tally(up, words - up), [0.7]) is None


def test_a_rater_who_agrees_less_than_a_coin_is_contrary() -> None:
    assert rater_trust.contrary(Tally(0, 0, agreed=2, disagreed=6)) is None
    assert rater_trust.contrary(Tally(0, 0, agreed=2, disagreed=40)) == "agrees with others in 2.0 of 42.0 comparisons"
    assert rater_trust.contrary(Tally(0, 0, agreed=40, disagreed=2)) is None


def test_a_burst_is_one_voice_far_above_the_others() -> None:
    page = {f"HUMAN/{number}": 1 for number in range(20)}
    assert rater_trust.burst("HUMAN/loud", page | {"HUMAN/loud": 12}) is None
    assert rater_trust.burst("HUMAN/loud", page | {"HUMAN/loud": 40}) == "40 words at once, where others have 1.0"
    assert rater_trust.burst("HUMAN/0", page | {"HUMAN/loud": 40}) is None
    assert rater_trust.burst("HUMAN/loud", {"HUMAN/loud": 400, "HUMAN/0": 1}) is None, "in a small place nobody is loud"


def test_one_account_cannot_be_the_crowd() -> None:
    said = {"HUMAN/loud": Tally(300, 0), "HUMAN/1": Tally(1, 2), "HUMAN/held": Tally(0, 3)}
    assert rater_trust.voices(said, {"HUMAN/held"}) == Tally(6, 2)


def test_what_the_crowd_said_fades_by_half_in_a_thousand_words() -> None:
    assert rater_trust.faded(Tally(100, 50), Tally(600, 400)) == Tally(650, 425)


def test_two_who_agree_and_one_who_does_not() -> None:
    turn = [RaterSignal("a", 1.0), RaterSignal("b", 0.5), RaterSignal("c", -1.0)]
    gained = rater_trust.agreement(turn)
    # a hears b (0.5, alike) and c (1, not): 1.5 in all, so a third and two thirds
    assert gained["a"] == pytest.approx((1 / 3, 2 / 3))
    assert gained["b"] == pytest.approx((0.5, 0.5))
    assert gained["c"] == pytest.approx((0.0, 1.0))


def test_a_machine_vouches_as_far_as_it_is_believed_and_is_not_judged() -> None:
    assert rater_trust.agreement([RaterSignal("a", 1.0), RaterSignal(None, -1.0, weight=0.25)]) == {"a": (0.0, 0.25)}


def test_words_that_were_compared_before_are_not_compared_again() -> None:
    known = [RaterSignal("a", 1.0, fresh=False), RaterSignal("b", -1.0, fresh=False)]
    assert rater_trust.agreement(known) == {}
    with_third = rater_trust.agreement([*known, RaterSignal(None, 1.0)])
    assert with_third == {"a": (1.0, 0.0), "b": (0.0, 1.0)}


def test_nobody_vouches_for_themselves() -> None:
    assert rater_trust.agreement([RaterSignal("a", 1.0), RaterSignal("a", 1.0)]) == {}


def test_near_duplicates_share_a_signature_and_others_do_not() -> None:
    draw = random.Random(3)
    text = [draw.randrange(30_000) for _ in range(400)]
    copies = [[*text[:place], draw.randrange(30_000), *text[place + 1 :]] for place in range(5, 400, 8)]
    mine = rater_trust.signature(text, text)
    assert len(mine) == 32 and mine == rater_trust.signature(tuple(text), tuple(text))
    same = sum(rater_trust.signature(text, copy) == mine for copy in copies) / len(copies)
    assert same > 0.7, "one token of 400 changes four of 397 runs: J = 0.98, and 0.98^8 = 0.85"
    others = {rater_trust.signature(text, [draw.randrange(30_000) for _ in range(400)]) for _ in range(50)}
    assert len(others) == 50 and mine not in others


def test_the_shortest_texts_have_a_signature_too() -> None:
    assert rater_trust.signature([], [5]) != rater_trust.signature([], [6])
    assert rater_trust.signature([1], [5]) == rater_trust.signature([1], [5])


def test_the_signature_is_the_same_on_every_machine() -> None:
    assert rater_trust.signature([1, 2, 3, 4, 5], [6, 7]) == "96fe455af44f9696c6cbd24fa76921c9"
