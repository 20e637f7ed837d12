"""Advantages: examples by hand, loops over tokens, and invariances."""

import statistics
from collections.abc import Callable
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from alignment.errors import AlignmentError, SingletonGroup
from alignment.functional import (
    discounted_turn_returns,
    gae_advantage,
    group_advantage,
    leave_one_out_advantage,
    reinforce_plus_plus_advantage,
    running_baseline,
)
from tests.support.random_batches import GARBAGE, Tokens, batches, fill_padding

REWARDS_B = torch.tensor([1.0, 0.0, 3.0, 0.0, 6.0])
GROUP_B = torch.tensor([5, 2, 5, 2, 2])  # {1, 3} around 2 and {0, 0, 6} around 2


def test_gae_by_hand() -> None:
    rewards_BT, values_BT = torch.tensor([[1.0, 0.0, 2.0]]), torch.tensor([[1.0, 2.0, 4.0]])
    gae = gae_advantage(rewards_BT, values_BT, torch.ones(1, 3), gamma=0.5, lam=0.5)
    # δ = 2 − 4, 0 + ½·4 − 2, 1 + ½·2 − 1 = −2, 0, 1 from the end;  A = −2, 0 − ¼·2, 1 − ¼·½
    assert gae.advantages_BT.tolist() == [[0.875, -0.5, -2.0]]
    assert gae.returns_BT.tolist() == [[1.875, 1.5, 2.0]]


def test_gae_skips_masked_tokens() -> None:
    rewards_BT, values_BT = torch.tensor([[1.0, 50.0, 2.0]]), torch.tensor([[1.0, 60.0, 4.0]])
    gae = gae_advantage(rewards_BT, values_BT, torch.tensor([[1.0, 0.0, 1.0]]), gamma=0.5, lam=0.5)
    # δ = −2, then 1 + ½·4 − 1 = 2;  A = −2, 2 − ¼·2
    assert gae.advantages_BT.tolist() == [[1.5, 0.0, -2.0]]
    assert gae.returns_BT.tolist() == [[2.5, 0.0, 2.0]]


@given(batches(), st.floats(0, 1), st.floats(0, 1))
def test_gae_is_the_sum_of_discounted_errors(batch: Tokens, gamma: float, lam: float) -> None:
    gae = gae_advantage(batch.rewards_BT, batch.old_BT, batch.mask_BT, gamma, lam)
    for row, mask in enumerate(batch.mask_BT.bool()):
        rewards, values = batch.rewards_BT[row][mask].tolist(), [*batch.old_BT[row][mask].tolist(), 0.0]
        errors = [reward + gamma * values[t + 1] - values[t] for t, reward in enumerate(rewards)]
        expected = [
            sum((gamma * lam) ** (later - t) * errors[later] for later in range(t, len(errors)))
            for t in range(len(errors))
        ]
        assert gae.advantages_BT[row][mask].tolist() == pytest.approx(expected, abs=1e-12)
        returns = [advantage + value for advantage, value in zip(expected, values, strict=False)]
        assert gae.returns_BT[row][mask].tolist() == pytest.approx(returns, abs=1e-12)
        assert not gae.advantages_BT[row][~mask].any()
        assert not gae.returns_BT[row][~mask].any()


def test_group_advantages_by_hand() -> None:
    # std with n − 1: √2 and √((4 + 4 + 16) / 2) = √12
    expected = [-1 / (2**0.5 + 1e-6), -2 / 12**0.5, 1 / (2**0.5 + 1e-6), -2 / 12**0.5, 4 / 12**0.5]
    assert group_advantage(REWARDS_B, GROUP_B).tolist() == pytest.approx(expected, abs=1e-6)
    assert group_advantage(REWARDS_B, GROUP_B, scale_by_std=False).tolist() == [-1.0, -2.0, 1.0, -2.0, 4.0]
    # with eps 1 instead: −1 / (√2 + 1)
    assert group_advantage(REWARDS_B, GROUP_B, eps=1.0)[0].item() == pytest.approx(1 - 2**0.5)


def test_leave_one_out_by_hand() -> None:
    # 1 − 3, 3 − 1;  0 − (0 + 6)/2 twice, 6 − 0
    assert leave_one_out_advantage(REWARDS_B, GROUP_B).tolist() == [-2.0, -3.0, 2.0, -3.0, 6.0]


def test_the_turns_of_an_attempt_share_its_weight() -> None:
    rewards_B, attempt_B = torch.tensor([3.0, 1.0, 0.0, 1.0]), torch.tensor([4, 4, 2, 7])
    # attempts {3, 1}, {0} and {1}: the mean is 1, and the variance ((4 + 0) / 2 + 1 + 0) / (3 − 1) = 3/2
    group_B, scale = torch.zeros(4, dtype=torch.long), 1.5**0.5
    advantages_B = group_advantage(rewards_B, group_B, attempt_B=attempt_B)
    assert advantages_B.tolist() == pytest.approx([2 / scale, 0.0, -1 / scale, 0.0], abs=1e-5)
    # 3 − (0 + 1)/2, 1 − (0 + 1)/2;  0 − (2 + 1)/2;  1 − (2 + 0)/2
    assert leave_one_out_advantage(rewards_B, group_B, attempt_B=attempt_B).tolist() == [2.5, 0.5, -1.5, 0.0]


@pytest.mark.parametrize("advantage", [group_advantage, leave_one_out_advantage])
def test_equal_rewards_have_zero_advantage(advantage: Callable[[Tensor, Tensor], Tensor]) -> None:
    rewards_B = torch.full((7,), 0.1)  # seven times 0.1 over 7 is not 0.1 in float32
    assert advantage(rewards_B, torch.zeros(7, dtype=torch.long)).tolist() == [0.0] * 7


@pytest.mark.parametrize("advantage", [group_advantage, leave_one_out_advantage])
def test_singleton_group_is_rejected_with_its_label(advantage: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(SingletonGroup, match="group 41 "):
        advantage(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([7, 41, 7]))


def grouped_rewards() -> st.SearchStrategy[tuple[Tensor, Tensor]]:
    """Rewards in groups of two to four, shuffled."""

    def make_groups(sizes: list[int], seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        group_B = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        group_B = group_B[torch.randperm(len(group_B), generator=generator)]
        return torch.randn(len(group_B), generator=generator, dtype=torch.float64), group_B

    return st.builds(make_groups, st.lists(st.integers(2, 4), min_size=1, max_size=4), st.integers(0, 2**32))


@given(grouped_rewards())
def test_group_advantages_agree_with_a_loop_over_groups(batch: tuple[Tensor, Tensor]) -> None:
    rewards_B, group_B = batch
    scaled_B, plain_B = group_advantage(rewards_B, group_B), group_advantage(rewards_B, group_B, scale_by_std=False)
    others_B = leave_one_out_advantage(rewards_B, group_B)
    for i, (reward, group) in enumerate(zip(rewards_B.tolist(), group_B.tolist(), strict=True)):
        members = rewards_B[group_B == group].tolist()
        difference = reward - statistics.fmean(members)
        rest = rewards_B[(group_B == group) & (torch.arange(len(rewards_B)) != i)].tolist()
        assert plain_B[i].item() == pytest.approx(difference, abs=1e-12)
        assert scaled_B[i].item() == pytest.approx(difference / (statistics.stdev(members) + 1e-6), abs=1e-9)
        assert others_B[i].item() == pytest.approx(reward - statistics.fmean(rest), abs=1e-12)


@given(grouped_rewards(), st.integers(0, 2**32))
def test_group_labels_and_order_do_not_matter(batch: tuple[Tensor, Tensor], seed: int) -> None:
    rewards_B, group_B = batch
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randperm(100, generator=generator) - 50
    order = torch.randperm(len(rewards_B), generator=generator)
    for advantage in (group_advantage, leave_one_out_advantage):
        expected_B = advantage(rewards_B, group_B)
        assert torch.equal(advantage(rewards_B, labels[group_B]), expected_B)
        assert torch.allclose(advantage(rewards_B[order], group_B[order]), expected_B[order], rtol=0, atol=1e-9)


def test_reinforce_plus_plus_by_hand() -> None:
    rewards_BT = torch.tensor([[0.0, 2.0], [4.0, 99.0]])
    mask_BT = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    # returns 0 + ½·2, 2, 4: mean 7/3, var ((4/3)² + (1/3)² + (5/3)²) / 2 = 7/3
    deviation = (7 / 3) ** 0.5
    expected_BT = torch.tensor([[-4 / 3, -1 / 3], [5 / 3, 0.0]]) / deviation
    assert torch.allclose(reinforce_plus_plus_advantage(rewards_BT, mask_BT, gamma=0.5), expected_BT)
    # with the group's baseline: sums 2 and 4 around 3; tokens −1, −1, 1: mean −1/3, var (4 + 4 + 16)/9/2 = 4/3
    expected_BT = torch.tensor([[-2 / 3, -2 / 3], [4 / 3, 0.0]]) / (4 / 3) ** 0.5
    grouped_BT = reinforce_plus_plus_advantage(rewards_BT, mask_BT, group_B=torch.tensor([1, 1]))
    assert torch.allclose(grouped_BT, expected_BT)


def test_returns_skip_masked_tokens_without_a_discount() -> None:
    rewards_BT = torch.tensor([[0.0, 9.0, 2.0], [3.0, 9.0, 9.0]])
    mask_BT = torch.tensor([[1.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    advantages_BT = reinforce_plus_plus_advantage(rewards_BT, mask_BT, gamma=0.5)
    # returns ½·2 = 1, 2, 3: whitened −1, 0, 1
    assert torch.allclose(advantages_BT, torch.tensor([[-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]), atol=1e-6)


def test_reinforce_plus_plus_rejects_invalid_arguments() -> None:
    rewards_BT, mask_BT = torch.randn(3, 2), torch.ones(3, 2)
    with pytest.raises(SingletonGroup, match="group 9 "):
        reinforce_plus_plus_advantage(rewards_BT, mask_BT, group_B=torch.tensor([4, 4, 9]))
    with pytest.raises(ValueError, match="gamma must be 1, not "):
        reinforce_plus_plus_advantage(rewards_BT, mask_BT, gamma=0.9, group_B=torch.tensor([4, 4, 4]))


@given(batches(), st.sampled_from(GARBAGE))
def test_padding_content_does_not_matter(batch: Tokens, garbage: float) -> None:
    mask_BT, group_B = batch.mask_BT, torch.zeros(len(batch.mask_BT), dtype=torch.long)

    def results(fill: float) -> list[Tensor]:
        rewards_BT = fill_padding(batch.rewards_BT, mask_BT, fill)
        actual = [*gae_advantage(rewards_BT, fill_padding(batch.old_BT, mask_BT, fill), mask_BT, 0.9, 0.8)]
        actual.append(reinforce_plus_plus_advantage(rewards_BT, mask_BT, gamma=0.9))
        if len(group_B) > 1:
            actual.append(reinforce_plus_plus_advantage(rewards_BT, mask_BT, group_B=group_B))
        return actual

    for garbage_padded_BT, zero_padded_BT in zip(results(garbage), results(0.0), strict=True):
        assert torch.equal(garbage_padded_BT, zero_padded_BT)


def test_baseline_is_updated_after_use() -> None:
    advantages_B, baseline = running_baseline(torch.tensor([1.0, -1.0, 1.0]), 0.5, 0.9)
    assert advantages_B.tolist() == [0.5, -1.5, 0.5]
    # 0.9 · 0.5 + 0.1 · 1/3
    assert baseline == pytest.approx(0.45 + 0.1 / 3)


def test_mismatched_shapes_are_named() -> None:
    with pytest.raises(ValueError, match=r"rewards_B \[3\], group_B \[2\]"):
        group_advantage(torch.zeros(3), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match=r"values_BT \[2, 4\]"):
        gae_advantage(torch.zeros(2, 3), torch.zeros(2, 4), torch.ones(2, 3), 1.0, 1.0)
    with pytest.raises(ValueError, match=r"mask_BT \[1, 3\]"):
        reinforce_plus_plus_advantage(torch.zeros(2, 3), torch.ones(1, 3))


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
def test_turn_return_is_the_discounted_sum_in_any_order(
    turns: dict[tuple[int, int], float], discount: float, random: Random
) -> None:
    positions = list(turns)
    random.shuffle(positions)
    returns_B = discounted_turn_returns(
        torch.tensor([turns[position] for position in positions], dtype=torch.float64),
        torch.tensor([conversation for conversation, _ in positions]),
        torch.tensor([turn for _, turn in positions]),
        discount,
    )
    for position, actual in zip(positions, returns_B.tolist(), strict=True):
        remaining = sorted(later for later in positions if later[0] == position[0] and later[1] >= position[1])
        expected = sum(discount**steps * turns[later] for steps, later in enumerate(remaining))
        assert actual == pytest.approx(expected, abs=1e-12)


def test_without_a_discount_rewards_are_unchanged() -> None:
    rewards_B = torch.tensor([1.0, 2.0])
    returns_B = discounted_turn_returns(rewards_B, torch.tensor([3, 3]), torch.tensor([1, 1]), 0.0)
    assert returns_B.tolist() == [1.0, 2.0]
    assert returns_B is not rewards_B


def test_duplicate_turns_are_rejected() -> None:
    with pytest.raises(AlignmentError, match="turn 1 of conversation 3 occurs twice"):
        discounted_turn_returns(torch.ones(3), torch.tensor([3, 4, 3]), torch.tensor([1, 1, 1]), 0.5)


def test_mismatched_shapes_of_turns_are_named() -> None:
    with pytest.raises(ValueError, match=r"turn_B \[1\]"):
        discounted_turn_returns(torch.ones(2), torch.tensor([1, 2]), torch.tensor([0]), 0.5)
