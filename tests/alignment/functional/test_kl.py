"""KL estimates and the adaptive KL coefficient."""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from alignment.config.policy_gradient_algorithms import KLKind
from alignment.functional import AdaptiveKLController, aggregate, distribution_kl, kl_estimate
from tests.support.random_batches import GARBAGE, Tokens, batches, fill_padding, rows, with_gradient

KINDS = get_args(KLKind)


@pytest.mark.parametrize(
    ("kind", "value", "gradient"),
    [
        # d = ln 2:  d;  d²/2;  e^−d + d − 1;  |d|, and their derivatives
        ("k1", 0.693147, 1.0),
        ("k2", 0.240227, 0.693147),
        ("k3", 0.193147, 0.5),
        ("abs", 0.693147, 1.0),
        # the same values with k2's derivative
        ("k1+", 0.693147, 0.693147),
        ("k2+", 0.240227, 0.693147),
        ("k3+", 0.193147, 0.693147),
        ("abs+", 0.693147, 0.693147),
    ],
)
def test_estimates_by_hand(kind: KLKind, value: float, gradient: float) -> None:
    ref_logprobs_BT = torch.tensor([[math.log(0.25)]])
    actual = with_gradient(lambda x_BT: kl_estimate(x_BT, ref_logprobs_BT, kind).sum(), torch.tensor([[math.log(0.5)]]))
    assert (actual[0].item(), actual[1].item()) == pytest.approx((value, gradient), abs=1e-6)


def by_token(kind: str, logprob: float, reference: float) -> tuple[float, float]:
    d = logprob - reference
    value, gradient = {
        "k1": (d, 1.0),
        "k2": (0.5 * d * d, d),
        "k3": (math.exp(-d) + d - 1, 1 - math.exp(-d)),
        "abs": (abs(d), math.copysign(1.0, d)),
    }[kind.removesuffix("+")]
    return value, d if kind.endswith("+") else gradient


@pytest.mark.parametrize("kind", KINDS)
@given(batch=batches())
def test_values_and_gradients_agree_with_a_loop(kind: KLKind, batch: Tokens) -> None:
    value_BT = kl_estimate(batch.logprobs_BT, batch.old_BT, kind)
    _, gradient_BT = with_gradient(lambda x_BT: kl_estimate(x_BT, batch.old_BT, kind).sum(), batch.logprobs_BT)
    for value, gradient, *token in rows(value_BT, gradient_BT, batch.logprobs_BT, batch.old_BT):
        assert (value, gradient) == pytest.approx(by_token(kind, *token), abs=1e-12)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.endswith("+")])
@given(batch=batches())
def test_straight_through_has_the_value_of_the_kind_and_the_gradient_of_k2(kind: KLKind, batch: Tokens) -> None:
    base: KLKind = kind.removesuffix("+")  # type: ignore[assignment]
    expected_BT = kl_estimate(batch.logprobs_BT, batch.old_BT, base)
    assert torch.equal(kl_estimate(batch.logprobs_BT, batch.old_BT, kind), expected_BT)
    _, actual_BT = with_gradient(lambda x_BT: kl_estimate(x_BT, batch.old_BT, kind).sum(), batch.logprobs_BT)
    _, k2_BT = with_gradient(lambda x_BT: kl_estimate(x_BT, batch.old_BT, "k2").sum(), batch.logprobs_BT)
    assert torch.equal(actual_BT, k2_BT)


def test_k3_is_bounded_at_both_ends() -> None:
    far_BT, zero_BT = torch.tensor([[-30.0, 30.0]]), torch.zeros(1, 2)
    assert kl_estimate(far_BT, zero_BT, "k3").tolist() == [[10.0, 10.0]]
    # a difference of 5 the other way is within the bound: e^−5 + 5 − 1
    assert kl_estimate(torch.tensor([[5.0]]), torch.zeros(1, 1), "k3").item() == pytest.approx(math.exp(-5) + 4)


@pytest.mark.parametrize("far", [-1000.0, 1000.0])
def test_k3_has_no_gradient_where_it_is_clamped(far: float) -> None:
    _, gradient_BT = with_gradient(lambda x_BT: kl_estimate(x_BT, torch.zeros(1, 1), "k3").sum(), torch.tensor([[far]]))
    assert gradient_BT.item() == 0.0


def test_k1_k2_and_abs_are_not_bounded() -> None:
    far_BT, zero_BT = torch.tensor([[-30.0]]), torch.zeros(1, 1)
    assert [kl_estimate(far_BT, zero_BT, kind).item() for kind in ("k1", "k2", "abs")] == [-30.0, 450.0, 30.0]


@pytest.mark.parametrize("kind", KINDS)
@given(batch=batches(), garbage=st.sampled_from(GARBAGE))
def test_padding_content_does_not_matter(kind: KLKind, batch: Tokens, garbage: float) -> None:
    def results_with_padding(fill: float) -> tuple[Tensor, Tensor]:
        ref_logprobs_BT = fill_padding(batch.old_BT, batch.mask_BT, -fill)
        return with_gradient(
            lambda x_BT: aggregate(kl_estimate(x_BT, ref_logprobs_BT, kind), batch.mask_BT, "token-mean"),
            fill_padding(batch.logprobs_BT, batch.mask_BT, fill),
        )

    for with_garbage, with_zeros in zip(results_with_padding(garbage), results_with_padding(0.0), strict=True):
        assert torch.equal(with_garbage, with_zeros)


@pytest.mark.parametrize("kind", KINDS)
def test_nan_inside_the_mask_is_visible(kind: KLKind) -> None:
    assert kl_estimate(torch.tensor([[math.nan]]), torch.zeros(1, 1), kind).isnan().all()


def test_unknown_kind_error_lists_the_kinds() -> None:
    with pytest.raises(ValueError, match=r"'k4': one of k1, k2, k3, abs, k1\+, k2\+, k3\+, abs\+"):
        kl_estimate(torch.zeros(1, 1), torch.zeros(1, 1), "k4")  # type: ignore[arg-type]


def test_mismatched_shapes_are_named() -> None:
    with pytest.raises(ValueError, match=r"ref_logprobs_BT \[2\]"):
        kl_estimate(torch.zeros(1, 2), torch.zeros(2), "k1")


def test_controller_check_vector() -> None:
    controller = AdaptiveKLController(init=0.001, target=0.1, horizon=10_000)
    controller.update(0.02, 256)  # e = −0.2 (0.02/0.1 − 1 = −0.8, bounded): 0.001 · (1 − 0.2·256/10000)
    assert controller.value == pytest.approx(0.00099488, rel=1e-12)
    controller.update(1.0, 256)  # e = 0.2
    assert controller.value == pytest.approx(0.0009999737856, rel=1e-12)


def test_controller_is_proportional_near_its_target() -> None:
    controller = AdaptiveKLController(init=1.0, target=0.1, horizon=100)
    controller.update(0.1, 50)
    assert controller.value == 1.0
    controller.update(0.11, 50)  # e = 0.1: 1 + 0.1 · 50/100
    assert controller.value == pytest.approx(1.05)


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_controller_rejects_non_finite_kl(kl: float) -> None:
    controller = AdaptiveKLController(init=0.5, target=0.1, horizon=1)
    with pytest.raises(ValueError, match="KL must be finite"):
        controller.update(kl, 1)
    assert controller.value == 0.5


@pytest.mark.parametrize(("target", "horizon"), [(0.0, 1), (0.1, 0)])
def test_controller_needs_a_positive_target_and_horizon(target: float, horizon: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        AdaptiveKLController(0.1, target, horizon)


def make_distributions(size: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the log-probs of 50 tokens at 20 places, before and after the logits have changed by about `size`."""
    generator = torch.Generator().manual_seed(0)
    logits_NV = 3 * torch.randn(20, 50, generator=generator, dtype=torch.float64)
    new_logits_NV = logits_NV + size * torch.randn(20, 50, generator=generator, dtype=torch.float64)
    return logits_NV.log_softmax(-1).to(dtype), new_logits_NV.log_softmax(-1).to(dtype)


def full_kl(old_NV: Tensor, new_NV: Tensor) -> Tensor:
    return torch.nn.functional.kl_div(new_NV, old_NV, reduction="none", log_target=True).sum(-1)


@pytest.mark.parametrize("size", [0.01, 0.1, 1.0, 5.0])
def test_kl_of_distributions_is_exact_with_the_whole_vocabulary(size: float) -> None:
    expected_N = full_kl(*make_distributions(size, torch.float64))
    torch.testing.assert_close(distribution_kl(*make_distributions(size, torch.float64)), expected_N)
    actual_N = distribution_kl(*make_distributions(size, torch.float32)).double()
    torch.testing.assert_close(actual_N, expected_N, rtol=1e-3, atol=2e-6)


@pytest.mark.parametrize("size", [0.1, 1.0])
def test_kl_of_the_likeliest_tokens_is_a_lower_bound_that_rises_with_their_number(size: float) -> None:
    old_NV, new_NV = make_distributions(size, torch.float64)
    order_NV = old_NV.argsort(-1, descending=True)
    old_NV, new_NV = old_NV.gather(-1, order_NV), new_NV.gather(-1, order_NV)
    bounds = [float(distribution_kl(old_NV[:, :count], new_NV[:, :count]).sum()) for count in (1, 3, 10, 30, 50)]
    assert bounds == sorted(bounds) and bounds[0] > 0
    assert bounds[3] > 0.97 * bounds[4] == pytest.approx(0.97 * float(full_kl(old_NV, new_NV).sum()))


def test_kl_of_equal_distributions_is_zero() -> None:
    old_NV, _ = make_distributions(1.0, torch.float32)
    assert distribution_kl(old_NV, old_NV).tolist() == [0.0] * len(old_NV)
    with pytest.raises(ValueError, match="shape"):
        distribution_kl(old_NV, old_NV[:, :2])
