"""Credit along a conversation."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alignment.errors import AlignmentError
from alignment.functional import discounted_turn_returns


def test_turn_return_includes_later_turns() -> None:
    rewards_B = torch.tensor([1.0, 2.0, 4.0, 8.0])
    conversation_B, turn_B = torch.tensor([7, 7, 9, 7]), torch.tensor([0, 2, 0, 5])
    # conversation 7: 8, 2 + ½·8, 1 + ½·6;  conversation 9: 4
    assert discounted_turn_returns(rewards_B, conversation_B, turn_B, 0.5).tolist() == [4.0, 6.0, 4.0, 8.0]


@given(
    st.dictionaries(st.tuples(st.integers(0, 3), st.integers(0, 5)), st.floats(-2, 2), min_size=1),
    st.floats(0.01, 1),
    st.randoms(),
)
def test_turn_return_is_the_discounted_sum_in_any_order(turns, discount, random) -> None:  # type: ignore[no-untyped-def]
    places = list(turns)
    random.shuffle(places)
    credit_B = discounted_turn_returns(
        torch.tensor([turns[place] for place in places], dtype=torch.float64),
        torch.tensor([conversation for conversation, _ in places]),
        torch.tensor([turn for _, turn in places]),
        discount,
    )
    for place, credit in zip(places, credit_B.tolist(), strict=True):
        after = sorted(later for later in places if later[0] == place[0] and later[1] >= place[1])
        wanted = sum(discount**steps * turns[later] for steps, later in enumerate(after))
        assert credit == pytest.approx(wanted, abs=1e-12)


def test_without_a_discount_rewards_are_unchanged() -> None:
    rewards_B = torch.tensor([1.0, 2.0])
    credit_B = discounted_turn_returns(rewards_B, torch.tensor([3, 3]), torch.tensor([1, 1]), 0.0)
    assert credit_B.tolist() == [1.0, 2.0]
    assert credit_B is not rewards_B


def test_duplicate_turns_are_rejected() -> None:
    with pytest.raises(AlignmentError, match="turn 1 of conversation 3 occurs twice"):
        discounted_turn_returns(torch.ones(3), torch.tensor([3, 4, 3]), torch.tensor([1, 1, 1]), 0.5)


def test_mismatched_shapes_are_named() -> None:
    with pytest.raises(ValueError, match=r"turn_B \[1\]"):
        discounted_turn_returns(torch.ones(2), torch.tensor([1, 2]), torch.tensor([0]), 0.5)
