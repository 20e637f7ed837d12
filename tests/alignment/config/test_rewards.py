"""What a turn is worth: each kind of feedback, sources together, and credit over a conversation."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from alignment.config.rewards import ExplicitSource, RewardsConfig, Signal, combine, credit, order, spread, worth

EXPLICIT = ExplicitSource(labels={"rude": -1.0})
THREE = RewardsConfig.model_validate(
    {
        "sources": [
            {"type": "explicit"},
            {"type": "next_turn", "weight": 0.5},
            {"type": "judge", "url": "http://judge/v1", "model": "m", "weight": 0.25},
        ]
    }
)


@pytest.mark.parametrize(
    ("kind", "value", "label", "reward"),
    [
        ("binary", 1.0, "up", 1.0),
        ("binary", -1.0, False, -1.0),
        ("score", 0.25, 0.25, 0.25),
        ("rating", -0.5, 2, -0.5),
        ("comment", None, "nice", None),
        ("correction", None, "better", -0.5),
        ("categorical", None, "rude", -1.0),
        ("categorical", None, "greeting", None),
        ("withdrawal", None, None, None),
    ],
)
def test_each_kind_is_worth_what_it_says(kind: str, value: float, label: object, reward: float) -> None:
    assert worth(kind, value, label, EXPLICIT) == reward


@pytest.mark.parametrize(
    ("kind", "value"), [("binary", 0.5), ("score", 1.5), ("rating", math.nan), ("score", None), ("binary", 0.0)]
)
def test_a_number_that_cannot_be_is_refused(kind: str, value: float | None) -> None:
    with pytest.raises(ValueError):
        worth(kind, value, value, EXPLICIT)


def test_a_correction_is_worth_nothing_where_it_is_told_to_be() -> None:
    assert worth("correction", None, "better", ExplicitSource(correction=None)) is None


def test_words_of_one_source_are_weighed_by_how_far_their_raters_are_believed() -> None:
    words = [Signal("explicit", 1.0, weight=0.75), Signal("explicit", -1.0, weight=0.25)]
    assert combine(words, RewardsConfig()) == 0.5


def test_sources_are_weighed_by_the_config() -> None:
    assert combine([Signal("next_turn", 1.0), Signal("judge", -1.0)], THREE) == pytest.approx((0.5 - 0.25) / 0.75)


def test_a_machine_counts_less_where_a_person_has_spoken() -> None:
    words = [Signal("explicit", 1.0, person=True), Signal("judge", -1.0)]
    assert combine(words, THREE) == pytest.approx((1.0 - 0.25 * 0.25) / (1.0 + 0.25 * 0.25))
    assert combine([Signal("explicit", 1.0), Signal("judge", -1.0)], THREE) == pytest.approx(0.75 / 1.25), "a program"


def test_who_is_not_believed_at_all_says_nothing() -> None:
    assert combine([Signal("explicit", 1.0, weight=0.0, person=True)], THREE) is None
    assert combine([Signal("explicit", 1.0, weight=0.0, person=True), Signal("judge", -0.5)], THREE) == -0.5


def test_a_source_that_the_policy_does_not_listen_to_says_nothing() -> None:
    assert combine([Signal("judge", 1.0)], RewardsConfig()) is None


@given(
    st.lists(
        st.builds(
            Signal,
            st.sampled_from(["explicit", "next_turn", "judge"]),
            st.floats(-1, 1),
            st.floats(0.01, 1),
            st.booleans(),
        ),
        min_size=1,
    )
)
def test_what_words_come_to_lies_between_the_lowest_and_the_highest(words: list[Signal]) -> None:
    together = combine(words, THREE)
    values = [word.value for word in words]
    assert together is not None and min(values) - 1e-9 <= together <= max(values) + 1e-9


def test_credit_flows_from_a_reply_to_the_one_before() -> None:
    assert credit(None, None, 0.5) is None
    assert credit(0.5, 1.0, 0.0) == 0.5
    assert credit(0.5, 1.0, 0.5) == 1.0
    assert credit(None, 1.0, 0.5) == 0.5


def test_what_is_said_of_a_conversation_falls_on_its_replies() -> None:
    def shares(**config: object) -> list[float]:
        return spread(1.0, 3, RewardsConfig.model_validate(config))

    assert shares() == [1.0, 1.0, 1.0]
    assert shares(spread="last") == [0.0, 0.0, 1.0]
    assert shares(spread="discounted", discount=0.5) == [0.25, 0.5, 1.0]


def test_an_order_is_numbers_from_best_to_worst() -> None:
    assert order({"a": 0, "b": 1}) == {"a": 1.0, "b": -1.0}
    assert order({"a": 0, "b": 1, "c": 1, "d": 5}) == {"a": 1.0, "b": 0.0, "c": 0.0, "d": -1.0}
    assert order({"a": 0, "b": 0}) == {"a": 0.0, "b": 0.0}


@pytest.mark.parametrize(
    "sources",
    [
        [],
        [{"type": "explicit"}, {"type": "explicit"}],
        [{"type": "next_turn", "judge": "nobody"}],
        [{"type": "oracle"}],
        [{"type": "judge", "url": "ftp://judge", "model": "m"}],
        [{"type": "explicit", "labels": {"rude": -7}}],
    ],
)
def test_a_config_that_cannot_be_is_refused(sources: list[dict[str, object]]) -> None:
    with pytest.raises(ValidationError):
        RewardsConfig.model_validate({"sources": sources})
