"""Rewards of feedback, combined rewards of a turn, and returns over a conversation."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignment.config.rewards import ExplicitSource, RewardsConfig
from alignment.signals.combine_rewards import (
    Signal,
    combine_rewards,
    discounted_return,
    feedback_reward,
    is_in_share,
    rewards_from_ranks,
    spread_over_turns,
)

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
def test_each_feedback_kind_has_its_reward(kind: str, value: float, label: object, reward: float) -> None:
    assert feedback_reward(kind, value, label, EXPLICIT) == reward


@pytest.mark.parametrize(
    ("kind", "value"), [("binary", 0.5), ("score", 1.5), ("rating", math.nan), ("score", None), ("binary", 0.0)]
)
def test_invalid_values_are_rejected(kind: str, value: float | None) -> None:
    with pytest.raises(ValueError):
        feedback_reward(kind, value, value, EXPLICIT)


def test_correction_reward_can_be_disabled() -> None:
    assert feedback_reward("correction", None, "better", ExplicitSource(correction=None)) is None


def combined(signals: list[Signal], config: RewardsConfig) -> float | None:
    """Return the combined reward without its weight."""
    result = combine_rewards(signals, config)
    return result and result.value


def test_signals_of_one_source_are_weighted_by_rater_trust() -> None:
    signals = [Signal("explicit", 1.0, weight=0.75), Signal("explicit", -1.0, weight=0.25)]
    assert combine_rewards(signals, RewardsConfig()) == (0.5, 1.0)


def test_weight_is_the_trust_in_the_signals() -> None:
    assert combine_rewards([Signal("explicit", 1.0, weight=0.4, person=True)], THREE) == (1.0, 0.4)
    two = [Signal("explicit", 1.0, weight=0.4, person=True)] * 2
    assert combine_rewards(two, THREE) == (1.0, 0.8), "two people who agree are more certain"
    assert combine_rewards([*two, *two], THREE) == (1.0, 1.0)
    # the sources' weights 1 and 0.25 · 0.25
    mixed = combine_rewards([two[0], Signal("judge", 1.0, weight=0.8)], THREE)
    assert mixed is not None and mixed.weight == pytest.approx((0.4 + 0.0625 * 0.8) / 1.0625)


def test_sources_are_weighted_by_the_config() -> None:
    assert combined([Signal("next_turn", 1.0), Signal("judge", -1.0)], THREE) == pytest.approx((0.5 - 0.25) / 0.75)


def test_automated_sources_count_less_with_human_feedback() -> None:
    signals = [Signal("explicit", 1.0, person=True), Signal("judge", -1.0)]
    assert combined(signals, THREE) == pytest.approx((1.0 - 0.25 * 0.25) / (1.0 + 0.25 * 0.25))
    assert combined([Signal("explicit", 1.0), Signal("judge", -1.0)], THREE) == pytest.approx(0.75 / 1.25), "a program"


def test_signals_without_weight_are_ignored() -> None:
    assert combine_rewards([Signal("explicit", 1.0, weight=0.0, person=True)], THREE) is None
    assert combined([Signal("explicit", 1.0, weight=0.0, person=True), Signal("judge", -0.5)], THREE) == -0.5


def test_unconfigured_sources_are_ignored() -> None:
    assert combine_rewards([Signal("judge", 1.0)], RewardsConfig()) is None


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
def test_combined_reward_is_between_the_lowest_and_highest_signal(signals: list[Signal]) -> None:
    result = combine_rewards(signals, THREE)
    values = [signal.value for signal in signals]
    assert result is not None and min(values) - 1e-9 <= result.value <= max(values) + 1e-9
    assert 0 < result.weight <= 1


def test_discounted_return_adds_later_rewards() -> None:
    assert discounted_return(None, None, 0.5) is None
    assert discounted_return(0.5, 1.0, 0.0) == 0.5
    assert discounted_return(0.5, 1.0, 0.5) == 1.0
    assert discounted_return(None, 1.0, 0.5) == 0.5


def test_conversation_reward_is_spread_over_turns() -> None:
    def shares(**config: object) -> list[float]:
        return spread_over_turns(1.0, 3, RewardsConfig.model_validate(config))

    assert shares() == [1.0, 1.0, 1.0]
    assert shares(spread="last") == [0.0, 0.0, 1.0]
    assert shares(spread="discounted", discount=0.5) == [0.25, 0.5, 1.0]


def test_ranks_map_to_rewards_from_best_to_worst() -> None:
    assert rewards_from_ranks({"a": 0, "b": 1}) == {"a": 1.0, "b": -1.0}
    assert rewards_from_ranks({"a": 0, "b": 1, "c": 1, "d": 5}) == {"a": 1.0, "b": 0.0, "c": 0.0, "d": -1.0}
    assert rewards_from_ranks({"a": 0, "b": 0}) == {"a": 0.0, "b": 0.0}


def test_share_is_exact_on_average_and_stable() -> None:
    turns = [f"chatcmpl-{number}" for number in range(4000)]
    in_share = {turn for turn in turns if is_in_share(turn, "judge", 0.5)}
    assert in_share == {turn for turn in turns if is_in_share(turn, "judge", 0.5)}
    assert 1850 < len(in_share) < 2150
    assert {turn for turn in turns if is_in_share(turn, "judge", 0.1)} < in_share
    assert all(is_in_share(turn, "judge", 1.0) for turn in turns)
    in_both_shares = in_share & {turn for turn in turns if is_in_share(turn, "other", 0.5)}
    assert 850 < len(in_both_shares) < 1150, "the shares of two sources are independent"
