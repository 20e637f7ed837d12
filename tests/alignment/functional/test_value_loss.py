"""The critic's loss: examples by hand and a plain loop, gradients included."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from alignment.functional import value_loss
from tests.support.random_batches import GARBAGE, Tokens, batches, fill_padding, rows, with_gradient


@pytest.mark.parametrize(
    ("value", "target", "clip", "loss", "gradient", "clipped"),
    [
        (2.0, 3.0, 0.5, 1.125, 0.0, 1),  # max(1, (1.5 − 3)²)/2
        (2.0, 0.0, 0.5, 2.0, 2.0, 0),  # max(4, 1.5²)/2
        (0.0, 3.0, 0.5, 4.5, -3.0, 0),  # max(9, (0.5 − 3)²)/2
        (1.2, 3.0, 0.5, 1.62, -1.8, 0),  # inside the clip: 1.8²/2
        (2.0, 3.0, None, 0.5, -1.0, 0),
    ],
)
def test_value_loss_by_hand(
    value: float, target: float, clip: float | None, loss: float, gradient: float, clipped: int
) -> None:
    values_BT = torch.tensor([[value]], requires_grad=True)
    actual = value_loss(values_BT, torch.tensor([[1.0]]), torch.tensor([[target]]), torch.ones(1, 1), clip=clip)
    actual.loss.backward()
    assert values_BT.grad is not None
    assert (actual.loss.item(), values_BT.grad.item(), actual.clipped_BT.item()) == pytest.approx(
        (loss, gradient, clipped)
    )


@given(batches(), st.floats(0.05, 1))
def test_loss_and_gradient_agree_with_a_loop(batch: Tokens, clip: float) -> None:
    values_BT, old_BT, returns_BT, mask_BT = batch.logprobs_BT, batch.old_BT, batch.rewards_BT, batch.mask_BT
    clipped_BT = value_loss(values_BT, old_BT, returns_BT, mask_BT, clip=clip).clipped_BT
    total, gradient_BT = with_gradient(
        lambda x_BT: value_loss(x_BT, old_BT, returns_BT, mask_BT, clip=clip, aggregation="token-sum").loss, values_BT
    )
    expected = 0.0
    for value, old, target, apply_mask, gradient, clipped in rows(
        values_BT, old_BT, returns_BT, mask_BT, gradient_BT, clipped_BT
    ):
        clamp_log_ratio = min(max(value, old - clip), old + clip)
        far = (clamp_log_ratio - target) ** 2 > (value - target) ** 2
        if apply_mask:
            expected += 0.5 * max((clamp_log_ratio - target) ** 2, (value - target) ** 2)
            assert gradient == pytest.approx(0.0 if far else value - target, abs=1e-12)
        assert clipped == (far and apply_mask)
    assert total.item() == pytest.approx(expected, abs=1e-10)


@given(batches())
def test_tokens_within_the_clip_are_not_marked(batch: Tokens) -> None:
    for dtype in (torch.float32, torch.float64):  # V − old and back again would differ in the last bit
        values_BT, old_BT, returns_BT, mask_BT = (
            x.to(dtype) for x in (batch.weights_BT, batch.rewards_BT, batch.advantages_BT, batch.mask_BT)
        )
        assert not value_loss(values_BT, old_BT, returns_BT, mask_BT, clip=100.0).clipped_BT.any()


@given(batches(), st.sampled_from(GARBAGE), st.sampled_from([None, 0.2]))
def test_padding_content_does_not_matter(batch: Tokens, garbage: float, clip: float | None) -> None:
    def results_with_padding(fill: float) -> tuple[Tensor, Tensor]:
        old_BT, returns_BT = (fill_padding(x_BT, batch.mask_BT, -fill) for x_BT in (batch.old_BT, batch.rewards_BT))
        return with_gradient(
            lambda x_BT: value_loss(x_BT, old_BT, returns_BT, batch.mask_BT, clip=clip).loss,
            fill_padding(batch.logprobs_BT, batch.mask_BT, fill),
        )

    for with_garbage, with_zeros in zip(results_with_padding(garbage), results_with_padding(0.0), strict=True):
        assert torch.equal(with_garbage, with_zeros)


@given(batches(), st.integers(1, 4))
def test_micro_batches_add_up(batch: Tokens, size: int) -> None:
    inputs = (batch.logprobs_BT, batch.old_BT, batch.rewards_BT, batch.mask_BT)
    batch_loss = value_loss(*inputs, clip=0.2)
    parts = [
        value_loss(*part, clip=0.2, denominator=batch.mask_BT.sum())
        for part in zip(*(x.split(size) for x in inputs), strict=True)
    ]
    assert torch.allclose(torch.stack([part.loss for part in parts]).sum(), batch_loss.loss, rtol=0, atol=1e-12)
    assert torch.equal(torch.cat([part.clipped_BT for part in parts]), batch_loss.clipped_BT)


def test_only_the_values_carry_gradient() -> None:
    values_BT, old_BT, returns_BT = (torch.randn(2, 3).requires_grad_() for _ in range(3))
    value_loss(values_BT, old_BT, returns_BT, torch.ones(2, 3), clip=0.1).loss.backward()
    assert values_BT.grad is not None
    assert old_BT.grad is None
    assert returns_BT.grad is None


def test_invalid_arguments_are_rejected() -> None:
    ones_BT = torch.ones(2, 3)
    with pytest.raises(ValueError, match="None turns it off"):
        value_loss(ones_BT, ones_BT, ones_BT, ones_BT, clip=0.0)
    with pytest.raises(ValueError, match=r"returns_BT \[2, 1\]"):
        value_loss(ones_BT, ones_BT, ones_BT[:, :1], ones_BT, clip=None)
    with pytest.raises(ValueError, match="unknown aggregation 'sum'"):
        value_loss(ones_BT, ones_BT, ones_BT, ones_BT, clip=None, aggregation="sum")  # type: ignore[arg-type]
