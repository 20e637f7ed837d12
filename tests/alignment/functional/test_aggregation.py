"""Masked means, whitening and aggregation: examples by hand, loops, and minibatches split into parts."""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from alignment.config.policy_gradient_algorithms import Aggregation
from alignment.errors import AlignmentError
from alignment.functional import aggregate, masked_mean, whiten
from tests.support.random_batches import GARBAGE, Tokens, batches, fill_padding, with_gradient

X_BT = torch.tensor([[1.0, 3.0], [5.0, 99.0]])
X_MASK_BT = torch.tensor([[1.0, 1.0], [1.0, 0.0]])


def test_whitening_ignores_padding_and_uses_the_unbiased_variance() -> None:
    # mean = 9/3 = 3;  var = (4 + 0 + 4) / (3 − 1) = 4;  (x − 3) / 2
    assert masked_mean(X_BT, X_MASK_BT).item() == 3.0
    assert torch.allclose(whiten(X_BT, X_MASK_BT), torch.tensor([[-1.0, 0.0], [1.0, 0.0]]))


def test_scaling_without_centring_is_by_the_root_mean_square() -> None:
    expected = torch.tensor([[1.0, 3.0], [5.0, 0.0]]) / math.sqrt(35 / 3)
    assert torch.allclose(whiten(X_BT, X_MASK_BT, centre=False), expected)


def test_scaled_values_that_are_nearly_equal_are_bounded() -> None:
    near_BT = torch.tensor([[0.5, 0.5 + 1e-6], [0.5, 99.0]])
    assert torch.allclose(whiten(near_BT, X_MASK_BT, centre=False), X_MASK_BT, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64])
def test_a_mask_may_be_of_any_type(dtype: torch.dtype) -> None:
    assert torch.equal(whiten(X_BT, X_MASK_BT.to(dtype)), whiten(X_BT, X_MASK_BT))


def test_equal_values_whiten_to_zero() -> None:
    assert whiten(torch.full((2, 2), 7.0), X_MASK_BT).tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_one_token_is_rejected() -> None:
    with pytest.raises(AlignmentError, match="at least two tokens, but the mask holds 1"):
        whiten(torch.ones(1, 2), torch.tensor([[1.0, 0.0]]))


@given(batches())
def test_whitened_values_have_mean_0_and_variance_1(batch: Tokens) -> None:
    present_BT = batch.mask_BT.bool()
    apply_mask = whiten(batch.rewards_BT, batch.mask_BT)[present_BT]
    variance = batch.rewards_BT[present_BT].var().item()
    assert apply_mask.mean().item() == pytest.approx(0, abs=1e-9)
    assert apply_mask.var().item() == pytest.approx(variance / (variance + 1e-8))  # 1 where the variance is not tiny


@given(batches(), st.sampled_from(GARBAGE))
def test_padding_content_does_not_matter_to_whitening(batch: Tokens, garbage: float) -> None:
    zero_padded_BT, mask_BT = fill_padding(batch.rewards_BT, batch.mask_BT, 0.0), batch.mask_BT
    garbage_padded_BT = fill_padding(batch.rewards_BT, mask_BT, garbage)
    assert torch.equal(whiten(garbage_padded_BT, mask_BT), whiten(zero_padded_BT, mask_BT))
    mean, gradient_BT = with_gradient(lambda x_BT: masked_mean(x_BT, mask_BT), garbage_padded_BT)
    assert mean.isfinite()
    assert torch.equal(gradient_BT, mask_BT / mask_BT.sum())


MODES = get_args(Aggregation)
LOSS_BT = torch.tensor([[1.0, 2.0, 3.0], [4.0, 9.0, 9.0]])
MASK_BT = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
HORIZON = 8


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 2.5),  # (1 + 2 + 3 + 4) / 4
        ("token-sum", 10.0),
        ("seq-mean-token-sum", 5.0),  # (6 + 4) / 2
        ("seq-mean-token-sum-norm", 0.625),  # 5 / 8
        ("seq-mean-token-mean", 3.0),  # (6/3 + 4/1) / 2
    ],
)
def test_aggregation_by_hand(mode: Aggregation, expected: float) -> None:
    assert aggregate(LOSS_BT, MASK_BT, mode, horizon=HORIZON).item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 1.0),
        ("token-sum", 10.0),  # has no denominator
        ("seq-mean-token-sum", 1.0),
        ("seq-mean-token-sum-norm", 0.125),
        ("seq-mean-token-mean", 0.6),
    ],
)
def test_denominator_replaces_the_count(mode: Aggregation, expected: float) -> None:
    for ten in (10, torch.tensor(10.0)):
        assert aggregate(LOSS_BT, MASK_BT, mode, denominator=ten, horizon=HORIZON).item() == pytest.approx(expected)


def test_token_mean_has_verls_epsilon() -> None:
    one_BT = torch.ones(1, 1, dtype=torch.float64)
    assert aggregate(one_BT, one_BT, "seq-mean-token-mean").item() == pytest.approx(1 / (1 + 1e-8), abs=1e-12)


def test_horizon_of_one_changes_nothing() -> None:
    actual = aggregate(LOSS_BT, MASK_BT, "seq-mean-token-sum-norm", horizon=1)
    assert torch.equal(actual, aggregate(LOSS_BT, MASK_BT, "seq-mean-token-sum"))


@pytest.mark.parametrize("mode", MODES)
def test_empty_sequences_are_not_counted(mode: Aggregation) -> None:
    loss_BT, mask_BT = torch.cat([LOSS_BT, LOSS_BT]), torch.cat([MASK_BT, torch.zeros(2, 3)])
    actual = aggregate(loss_BT, mask_BT, mode, horizon=HORIZON)
    assert torch.equal(actual, aggregate(LOSS_BT, MASK_BT, mode, horizon=HORIZON))


@pytest.mark.parametrize("mode", MODES)
def test_empty_part_adds_nothing(mode: Aggregation) -> None:
    assert aggregate(LOSS_BT, torch.zeros(2, 3), mode, denominator=4, horizon=HORIZON).item() == 0.0


def by_loops(loss_BT: Tensor, mask_BT: Tensor, mode: Aggregation) -> float:
    sequences = [
        [loss for loss, is_inside in zip(losses, mask, strict=True) if is_inside]
        for losses, mask in zip(loss_BT.tolist(), mask_BT.tolist(), strict=True)
    ]
    sequences = [losses for losses in sequences if losses]
    tokens = [loss for losses in sequences for loss in losses]
    sums = [sum(losses) for losses in sequences]
    return {
        "token-mean": sum(tokens) / len(tokens),
        "token-sum": sum(tokens),
        "seq-mean-token-sum": sum(sums) / len(sums),
        "seq-mean-token-sum-norm": sum(sums) / len(sums) / HORIZON,
        "seq-mean-token-mean": sum(s / len(losses) for s, losses in zip(sums, sequences, strict=True)) / len(sums),
    }[mode]


@given(batches(), st.sampled_from(MODES))
def test_aggregation_agrees_with_loops(batch: Tokens, mode: Aggregation) -> None:
    actual = aggregate(batch.rewards_BT, batch.mask_BT, mode, horizon=HORIZON).item()
    assert actual == pytest.approx(by_loops(batch.rewards_BT, batch.mask_BT, mode), abs=1e-7, rel=1e-7)


@given(batches(), st.sampled_from(MODES))
def test_gradient_is_the_weight_of_a_token(batch: Tokens, mode: Aggregation) -> None:
    mask_BT = batch.mask_BT
    _, gradient_BT = with_gradient(lambda x_BT: aggregate(x_BT, mask_BT, mode, horizon=HORIZON), batch.rewards_BT)
    sequences, tokens_B1 = (mask_BT.sum(-1) > 0).sum(), mask_BT.sum(-1, keepdim=True)
    weight = {
        "token-mean": 1 / mask_BT.sum(),
        "token-sum": torch.tensor(1.0),
        "seq-mean-token-sum": 1 / sequences,
        "seq-mean-token-sum-norm": 1 / sequences / HORIZON,
        "seq-mean-token-mean": 1 / sequences / tokens_B1.clamp(min=1),
    }[mode]
    assert torch.allclose(gradient_BT, mask_BT * weight, atol=1e-7)


@given(batches(), st.sampled_from(MODES), st.integers(1, 4))
def test_micro_batches_add_up(batch: Tokens, mode: Aggregation, size: int) -> None:
    mask_BT = batch.mask_BT
    count = mask_BT.sum() if mode == "token-mean" else (mask_BT.sum(-1) > 0).sum()

    def loss_of_batch(x_BT: Tensor) -> Tensor:
        return aggregate(x_BT, mask_BT, mode, horizon=HORIZON)

    def sum_of_parts(x_BT: Tensor) -> Tensor:
        split = zip(x_BT.split(size), mask_BT.split(size), strict=True)
        return torch.stack([aggregate(x, m, mode, denominator=count, horizon=HORIZON) for x, m in split]).sum()

    for expected, actual in zip(
        with_gradient(loss_of_batch, batch.rewards_BT), with_gradient(sum_of_parts, batch.rewards_BT), strict=True
    ):
        assert torch.allclose(actual, expected, rtol=0, atol=1e-12)


@given(batches(), st.sampled_from(MODES), st.sampled_from(GARBAGE))
def test_padding_content_does_not_matter(batch: Tokens, mode: Aggregation, garbage: float) -> None:
    def results_with_padding(fill: float) -> tuple[Tensor, Tensor]:
        return with_gradient(
            lambda x_BT: aggregate(x_BT, batch.mask_BT, mode, horizon=HORIZON),
            fill_padding(batch.rewards_BT, batch.mask_BT, fill),
        )

    for with_garbage, with_zeros in zip(results_with_padding(garbage), results_with_padding(0.0), strict=True):
        assert torch.equal(with_garbage, with_zeros)


@pytest.mark.parametrize("horizon", [None, 0])
def test_horizon_is_required(horizon: int | None) -> None:
    with pytest.raises(ValueError, match="needs a horizon"):
        aggregate(LOSS_BT, MASK_BT, "seq-mean-token-sum-norm", horizon=horizon)


def test_unknown_mode_error_lists_the_modes() -> None:
    with pytest.raises(ValueError, match=r"'mean': one of token-mean, token-sum, .*seq-mean-token-mean"):
        aggregate(LOSS_BT, MASK_BT, "mean")  # type: ignore[arg-type]


def test_mismatched_shapes_are_named() -> None:
    with pytest.raises(ValueError, match=r"loss_BT \[2, 3\], mask_BT \[2, 1\]"):
        aggregate(LOSS_BT, MASK_BT[:, :1], "token-mean")
