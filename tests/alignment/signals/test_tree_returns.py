"""Returns along the tree of an episode's turns, worked out by hand."""

import pytest

from alignment.signals.combine_rewards import CombinedReward
from alignment.signals.tree_returns import Step, tree_returns


def worth(value: float, weight: float = 1.0) -> CombinedReward:
    return CombinedReward(value, weight)


def values(steps: list[Step], outcome: float | None, discount: float = 0.5) -> dict[str, float | None]:
    returns = tree_returns(steps, None if outcome is None else worth(outcome), discount)
    return {id: found if found is None else found.value for id, found in returns.items()}


LINE = [Step("a", None), Step("b", "a"), Step("c", "b")]


def test_outcome_is_discounted_for_each_turn_before_the_last() -> None:
    assert values(LINE, 1.0) == {"c": 1.0, "b": 0.5, "a": 0.25}


def test_rewards_of_a_turn_and_of_later_ones_add_up() -> None:
    steps = [Step("a", None), Step("b", "a", worth(-1.0)), Step("c", "b", worth(0.5))]
    # c: 0.5 + 1. b: −1 + 0.5 · 1.5. a: 0.5 · −0.25.
    assert values(steps, 1.0) == {"c": 1.5, "b": -0.25, "a": -0.125}


def test_without_an_outcome_turns_after_the_last_reward_have_no_return() -> None:
    steps = [Step("a", None), Step("b", "a", worth(1.0)), Step("c", "b")]
    assert values(steps, None) == {"c": None, "b": 1.0, "a": 0.5}


def test_branches_are_averaged() -> None:
    """a goes on as b – c and as d: two continuations of one turn."""
    steps = [Step("a", None), Step("b", "a"), Step("c", "b", worth(1.0)), Step("d", "a", worth(-1.0))]
    # c: 1 + 1. b: 1. d: −1 + 1. a: 0.5 · (1 + 0) / 2.
    assert values(steps, 1.0) == {"c": 2.0, "b": 1.0, "d": 0.0, "a": 0.25}
    # Without an outcome: d: −1. b: 0.5. a: 0.5 · (0.5 − 1) / 2.
    assert values(steps, None) == {"c": 1.0, "b": 0.5, "d": -1.0, "a": -0.125}


def test_a_branch_without_rewards_counts_as_zero_in_the_mean() -> None:
    steps = [Step("a", None), Step("b", "a", worth(1.0)), Step("c", "a")]
    assert values(steps, None) == {"b": 1.0, "c": None, "a": 0.25}


def test_calls_of_another_agent_in_between_cost_no_discount() -> None:
    """Planner p1 – p2 and worker w1 – w2 – w3 take turns. By time of call p1 would have γ⁴ of the outcome."""
    steps = [Step("p1", None), Step("w1", None), Step("w2", "w1", worth(1.0)), Step("w3", "w2"), Step("p2", "p1")]
    # The worker's reward is none of the planner's.
    assert values(steps, 1.0) == {"p2": 1.0, "p1": 0.5, "w3": 1.0, "w2": 1.5, "w1": 0.75}


def test_with_discount_1_and_nothing_but_the_outcome_every_return_is_the_outcome() -> None:
    steps = [*LINE, Step("d", "a"), Step("other", None), Step("gone", "a turn that is not there")]
    assert set(values(steps, -1.0, discount=1.0).values()) == {-1.0}


def test_weight_is_that_of_the_own_reward_or_of_what_it_inherits() -> None:
    steps = [Step("a", None), Step("b", "a", worth(1.0, 0.5)), Step("c", "a", worth(1.0, 0.25)), Step("d", "c")]
    weights = {id: found and found.weight for id, found in tree_returns(steps, worth(1.0, 0.75), 0.5).items()}
    assert weights == {"a": pytest.approx(0.375), "b": 0.5, "c": 0.25, "d": 0.75}
