"""The reward model's formulas against numbers worked out by hand."""

import math

import pytest
import torch
from torch import Tensor

from alignment.functional import (
    PlattScaling,
    auc,
    binary_feedback_loss,
    bradley_terry_loss,
    calibration_error,
    fit_platt_scaling,
)


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def test_bradley_terry_loss_by_hand() -> None:
    chosen, rejected = f64(1.0, 0.0), f64(0.0, 2.0)
    loss = bradley_terry_loss(chosen, rejected)
    # log(1 + e^-1) = 0.31326…, log(1 + e^2) = 2.12692…
    assert loss.tolist() == pytest.approx([0.3132616875, 2.1269280110])
    loss.sum().backward()
    # d/dc −log σ(c − r) = −σ(r − c): −σ(−1) = −0.26894…, −σ(2) = −0.88079…; −d/dr is the same
    assert chosen.grad is not None and rejected.grad is not None
    assert chosen.grad.tolist() == pytest.approx([-0.2689414214, -0.8807970780])
    assert rejected.grad.tolist() == pytest.approx([0.2689414214, 0.8807970780])


def test_binary_feedback_loss_by_hand() -> None:
    scores, bias = f64(1.0, 1.0, 1.0), torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    loss = binary_feedback_loss(scores, torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64), bias)
    up, down = math.log1p(math.exp(-0.5)), math.log1p(math.exp(0.5))  # −log σ(±(1 − 0.5))
    assert loss.tolist() == pytest.approx([up, down, (up + down) / 2])
    loss.sum().backward()
    # d/ds = σ(s − b) − p, with p = 1, 0, ½; σ(0.5) = 0.62246…
    assert scores.grad is not None and bias.grad is not None
    assert scores.grad.tolist() == pytest.approx([-0.3775406688, 0.6224593312, 0.1224593312])
    assert float(bias.grad) == pytest.approx(-float(scores.grad.sum()))


def test_gradients_equal_finite_differences() -> None:
    torch.manual_seed(0)
    one, other = (torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(bradley_terry_loss, (one, other))
    values = torch.tensor([1.0, -1.0, 0.5, -0.25, 0.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda scores: binary_feedback_loss(scores, values, 0.3), (one,))


def test_mismatched_shapes_are_rejected() -> None:
    for formula in (bradley_terry_loss, binary_feedback_loss, calibration_error, auc):
        with pytest.raises(ValueError, match="shapes do not match"):
            formula(torch.zeros(2), torch.zeros(3))


def test_platt_scaling_recovers_scale_and_shift() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(20_000, generator=generator, dtype=torch.float64) * 2
    up = torch.rand(20_000, generator=generator, dtype=torch.float64) < torch.sigmoid(0.5 * scores - 0.7)
    empty = torch.zeros(0)
    actual = fit_platt_scaling(scores, 2.0 * up - 1.0, torch.ones(20_000), empty, empty)
    assert actual == pytest.approx(PlattScaling(0.5, -0.7), abs=0.05)


def test_pairs_determine_the_scale_only() -> None:
    generator = torch.Generator().manual_seed(0)
    margins = torch.randn(20_000, generator=generator, dtype=torch.float64).abs()
    is_chosen_preferred = torch.rand(20_000, generator=generator, dtype=torch.float64) < torch.sigmoid(0.5 * margins)
    empty = torch.zeros(0)
    actual = fit_platt_scaling(
        empty, empty, empty, torch.where(is_chosen_preferred, margins, -margins), torch.ones(20_000)
    )
    assert actual == pytest.approx(PlattScaling(0.5, 0.0), abs=0.05)


def test_platt_scaling_is_identity_without_labels_and_finite_with_few() -> None:
    empty = torch.zeros(0)
    assert fit_platt_scaling(empty, empty, empty, empty, empty) == PlattScaling(1.0, 0.0)
    separable = fit_platt_scaling(torch.tensor([-1.0, 1.0]), torch.tensor([-1.0, 1.0]), torch.ones(2), empty, empty)
    assert 1.0 < separable.scale < 3.0 and separable.shift == pytest.approx(0.0)


def test_calibration_error_by_hand() -> None:
    probabilities = torch.tensor([0.05, 0.05, 0.75, 0.75, 0.75, 0.75])
    values = torch.tensor([-1.0, 1.0, 1.0, 1.0, 1.0, -1.0])
    # bin 0: |0.05 − 0.5| of 2 labels; bin 7: |0.75 − 0.75| of 4
    assert calibration_error(probabilities, values) == pytest.approx(0.45 * 2 / 6)
    weights = torch.tensor([3.0, 1.0, 1.0, 1.0, 1.0, 1.0])  # |4 · 0.05 − 1| of 8
    assert calibration_error(probabilities, values, weights) == pytest.approx(0.8 / 8)


def test_auc_by_hand() -> None:
    scores = torch.tensor([3.0, 1.0, 1.0, 0.0])
    assert auc(scores, torch.tensor([True, True, False, False])) == pytest.approx((2 + 1.5) / 4)
    assert auc(scores, torch.tensor([True, True, True, True])) is None
