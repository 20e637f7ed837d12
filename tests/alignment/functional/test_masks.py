"""Means and whitening, by hand and as properties."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alignment.errors import AlignmentError
from alignment.functional import masked_mean, whiten
from tests.support.random_batches import GARBAGE, Tokens, batches, spoiled, with_gradient

X_BT = torch.tensor([[1.0, 3.0], [5.0, 99.0]])
MASK_BT = torch.tensor([[1.0, 1.0], [1.0, 0.0]])


def test_whitening_ignores_padding_and_uses_the_unbiased_variance() -> None:
    # mean = 9/3 = 3;  var = (4 + 0 + 4) / (3 − 1) = 4;  (x − 3) / 2
    assert masked_mean(X_BT, MASK_BT).item() == 3.0
    assert torch.allclose(whiten(X_BT, MASK_BT), torch.tensor([[-1.0, 0.0], [1.0, 0.0]]))


def test_scaling_without_centring() -> None:
    assert torch.allclose(whiten(X_BT, MASK_BT, centre=False), torch.tensor([[0.5, 1.5], [2.5, 0.0]]))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64])
def test_a_mask_may_be_of_any_type(dtype: torch.dtype) -> None:
    assert torch.equal(whiten(X_BT, MASK_BT.to(dtype)), whiten(X_BT, MASK_BT))


def test_equal_values_whiten_to_zero() -> None:
    assert whiten(torch.full((2, 2), 7.0), MASK_BT).tolist() == [[0.0, 0.0], [0.0, 0.0]]


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
def test_padding_content_does_not_matter(batch: Tokens, garbage: float) -> None:
    clean_BT, mask_BT = spoiled(batch.rewards_BT, batch.mask_BT, 0.0), batch.mask_BT
    dirty_BT = spoiled(batch.rewards_BT, mask_BT, garbage)
    assert torch.equal(whiten(dirty_BT, mask_BT), whiten(clean_BT, mask_BT))
    mean, gradient_BT = with_gradient(lambda x_BT: masked_mean(x_BT, mask_BT), dirty_BT)
    assert mean.isfinite()
    assert torch.equal(gradient_BT, mask_BT / mask_BT.sum())
