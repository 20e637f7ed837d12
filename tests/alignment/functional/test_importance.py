"""Importance weights: examples by hand, plain loops, and the denominator of the loss after rejection."""

import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from alignment.config.algorithm import CorrectionLevel, CorrectionMode
from alignment.config.policy_gradient_algorithms import Aggregation
from alignment.errors import AlignmentError
from alignment.functional import aggregate, policy_loss, proximal_loglinear, rollout_correction
from tests.support.random_batches import GARBAGE, Tokens, batches, fill_padding

LEVELS, MODES = get_args(CorrectionLevel), get_args(CorrectionMode)
LN2, LN4 = math.log(2), math.log(4)
# ratios 4, 1 and ½; by sequence 4 and ½
OLD_BT = torch.tensor([[LN4 - 1, -2.0], [-LN2 - 3, 5.0]], dtype=torch.float64)
ROLLOUT_BT = torch.tensor([[-1.0, -2.0], [-3.0, 0.0]], dtype=torch.float64)
MASK_BT = torch.tensor([[1.0, 1.0], [1.0, 0.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("level", "mode", "low", "weights", "mask"),
    [
        ("token", "truncate", 0.0, [[2, 1], [0.5, 0]], [[1, 1], [1, 0]]),
        ("token", "mask", 0.4, [[0, 1], [0.5, 0]], [[1, 1], [1, 0]]),
        ("token", "mask", 0.8, [[0, 1], [0, 0]], [[1, 1], [1, 0]]),
        ("token", "clamp", 0.8, [[2, 1], [0.8, 0]], [[1, 1], [1, 0]]),
        ("token", "reject", 0.4, [[0, 1], [1, 0]], [[0, 1], [1, 0]]),
        ("token", "off", 0.0, [[1, 1], [1, 0]], [[1, 1], [1, 0]]),
        ("sequence", "truncate", 0.0, [[2, 2], [0.5, 0]], [[1, 1], [1, 0]]),
        ("sequence", "mask", 0.4, [[0, 0], [0.5, 0]], [[1, 1], [1, 0]]),
        ("sequence", "clamp", 0.8, [[2, 2], [0.8, 0]], [[1, 1], [1, 0]]),
        ("sequence", "reject", 0.4, [[0, 0], [1, 0]], [[0, 0], [1, 0]]),
    ],
)
def test_weights_by_hand(level: CorrectionLevel, mode: CorrectionMode, low: float, weights: Any, mask: Any) -> None:
    actual = rollout_correction(OLD_BT, ROLLOUT_BT, MASK_BT, level=level, mode=mode, low=low, high=2.0)
    assert torch.allclose(actual.weights_BT, torch.tensor(weights, dtype=torch.float64))
    assert actual.mask_BT.tolist() == mask


def test_default_truncates_token_weights_at_two() -> None:
    ratios_BT, ones_BT = torch.tensor([[4.0, 1.9, 0.4, 0.05]]), torch.ones(1, 4)
    actual = rollout_correction(ratios_BT.log(), torch.zeros(1, 4), ones_BT)
    assert actual.weights_BT.tolist() == [pytest.approx([2.0, 1.9, 0.4, 0.05])]
    assert actual.metrics["rollout_corr/rollout_is_ratio_fraction_low"] == 0.5  # two below ½


def test_bounds_are_inclusive() -> None:
    zero_BT, mask_BT = torch.zeros(1, 2), torch.ones(1, 2)
    for mode in ("mask", "reject"):
        actual = rollout_correction(zero_BT, zero_BT, mask_BT, mode=mode, low=1.0, high=2.0)
        assert actual.weights_BT.tolist() == [[1.0, 1.0]]
        actual = rollout_correction(zero_BT, zero_BT, mask_BT, mode=mode, low=0.5, high=1.0)
        assert actual.weights_BT.tolist() == [[1.0, 1.0]]


def test_metrics_by_hand() -> None:
    metrics = rollout_correction(OLD_BT, ROLLOUT_BT, MASK_BT, low=0.3, high=2.0).metrics
    expected = {
        "kl": -LN2 / 3,  # −(ln 4 + 0 − ln 2)/3
        "k3_kl": (3 - LN4 + 0 - 0.5 + LN2) / 3,  # w − ln w − 1
        "chi2_token": 17.25 / 3 - 1,  # (16 + 1 + ¼)/3 − 1
        "chi2_seq": 16.25 / 2 - 1,
        "training_ppl": (math.exp(1.5) / 2 + 2 * math.exp(3)) / 2,  # old means −1.5 + ln 2 and −3 − ln 2
        "rollout_ppl": (math.exp(1.5) + math.exp(3)) / 2,
        "log_ppl_diff": 0.0,  # (−ln 2 + ln 2)/2
        "ppl_ratio": 1.25,  # (½ + 2)/2
        "rollout_is_ratio_fraction_high": 1 / 3,
        "rollout_is_ratio_fraction_low": 0.0,  # of 4, 1, ½
        "rollout_is_mean": 3.5 / 3,  # of 2, 1, ½
        "rollout_is_std": math.sqrt(5.25 / 3 - (3.5 / 3) ** 2),
        "rollout_is_max": 2.0,
        "rollout_is_min": 0.5,
        "rollout_is_eff_sample_size": 7 / 9,  # (3.5/3)² / ((4 + 1 + ¼)/3)
        "rollout_rs_masked_fraction": 0.0,
    }
    assert metrics == pytest.approx({f"rollout_corr/{name}": value for name, value in expected.items()}, abs=1e-12)


def test_out_of_bounds_fractions_count_tokens_or_sequences() -> None:
    def shares(level: CorrectionLevel, low: float, high: float) -> tuple[float, float]:
        metrics = rollout_correction(OLD_BT, ROLLOUT_BT, MASK_BT, level=level, low=low, high=high).metrics
        return tuple(metrics[f"rollout_corr/rollout_is_ratio_fraction_{side}"] for side in ("low", "high"))  # type: ignore[return-value]

    assert shares("token", 0.6, 2.0) == pytest.approx((1 / 3, 1 / 3))
    assert shares("sequence", 0.6, 2.0) == pytest.approx((1 / 2, 1 / 2))
    assert shares("token", 0.0, 1.5) == pytest.approx((1 / 3, 1 / 3))  # the default of low is 1/1.5
    assert shares("sequence", 0.3, 8.0) == (0.0, 0.0)


def test_metrics_describe_the_bounded_weights() -> None:
    metrics = rollout_correction(OLD_BT, ROLLOUT_BT, MASK_BT, mode="reject", low=0.4, high=2.0).metrics
    # two of three tokens stay, with weight 1
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 / 3)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(2 / 3)
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(2 / 3)
    assert metrics["rollout_corr/chi2_token"] == pytest.approx(17.25 / 3 - 1)  # of the raw ratios


def test_metrics_are_finite_when_everything_is_rejected() -> None:
    actual = rollout_correction(OLD_BT, ROLLOUT_BT, MASK_BT, mode="reject", low=10.0, high=20.0)
    assert not actual.mask_BT.any()
    assert not actual.weights_BT.any()
    assert all(math.isfinite(value) for value in actual.metrics.values())
    assert actual.metrics["rollout_corr/rollout_is_eff_sample_size"] == 0.0


def test_ratios_are_bounded_by_e_to_the_20() -> None:
    far_BT, zero_BT, mask_BT = torch.tensor([[0.0, 0.0]]), torch.tensor([[-15.0, -60.0]]), torch.ones(1, 2)
    weights_BT = rollout_correction(far_BT, zero_BT, mask_BT, high=1e30).weights_BT
    assert weights_BT.tolist() == [pytest.approx([math.exp(15), math.exp(20)], rel=1e-5)]
    weights_BT = rollout_correction(far_BT, zero_BT / 5, mask_BT, level="sequence", high=1e30).weights_BT
    assert weights_BT.tolist() == [pytest.approx([math.exp(15), math.exp(15)], rel=1e-5)]
    far = rollout_correction(far_BT, zero_BT, mask_BT, level="sequence", high=1e30)
    assert far.weights_BT.tolist() == [pytest.approx([math.exp(20), math.exp(20)], rel=1e-5)]
    assert all(math.isfinite(value) for value in far.metrics.values())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
@given(batch=batches())
def test_weights_agree_with_a_loop(level: CorrectionLevel, mode: CorrectionMode, batch: Tokens) -> None:
    low, high = 0.7, 1.2
    actual = rollout_correction(
        batch.logprobs_BT, batch.old_BT, batch.mask_BT, level=level, mode=mode, low=low, high=high
    )
    for row, mask in enumerate(batch.mask_BT.tolist()):
        log_ratios = (batch.logprobs_BT[row] - batch.old_BT[row]).tolist()
        total = sum(log_ratio for log_ratio, apply_mask in zip(log_ratios, mask, strict=True) if apply_mask)
        for t, apply_mask in enumerate(mask):
            ratio = math.exp(log_ratios[t] if level == "token" else total)
            is_within_bounds = low <= ratio <= high
            weight = {
                "off": 1.0,
                "truncate": min(ratio, high),
                "mask": ratio if is_within_bounds else 0.0,
                "clamp": min(max(ratio, low), high),
                "reject": float(is_within_bounds),
            }[mode]
            assert actual.weights_BT[row, t].item() == pytest.approx(weight if apply_mask else 0.0, abs=1e-12)
            stays_in_mask = apply_mask and (is_within_bounds or mode != "reject")
            assert actual.mask_BT[row, t].item() == stays_in_mask


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
@given(batch=batches())
def test_rejected_tokens_stay_in_the_denominator(mode: Aggregation, batch: Tokens) -> None:
    correction = rollout_correction(batch.logprobs_BT, batch.old_BT, batch.mask_BT, mode="reject", low=0.7, high=1.2)
    pg = policy_loss(
        batch.logprobs_BT,
        batch.old_BT,
        batch.advantages_BT,
        batch.mask_BT,
        rollout_weights_BT=correction.weights_BT,
        aggregation=mode,
    )
    unweighted_BT = policy_loss(batch.logprobs_BT, batch.old_BT, batch.advantages_BT, batch.mask_BT).loss_BT
    assert torch.equal(pg.loss_BT, unweighted_BT * correction.mask_BT)
    assert pg.loss.item() == aggregate(unweighted_BT * correction.mask_BT, batch.mask_BT, mode).item()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
@given(batch=batches(), garbage=st.sampled_from(GARBAGE))
def test_padding_content_does_not_matter(
    level: CorrectionLevel, mode: CorrectionMode, batch: Tokens, garbage: float
) -> None:
    def results_with_padding(fill: float) -> Any:
        return rollout_correction(
            fill_padding(batch.logprobs_BT, batch.mask_BT, fill),
            fill_padding(batch.old_BT, batch.mask_BT, -fill),
            batch.mask_BT,
            level=level,
            mode=mode,
        )

    with_garbage, with_zeros = results_with_padding(garbage), results_with_padding(0.0)
    assert torch.equal(with_garbage.weights_BT, with_zeros.weights_BT)
    assert torch.equal(with_garbage.mask_BT, with_zeros.mask_BT)
    assert with_garbage.metrics == with_zeros.metrics


@given(batch=batches(), seed=st.integers(0, 2**32), level=st.sampled_from(LEVELS))
def test_permuting_sequences_permutes_the_weights(batch: Tokens, seed: int, level: CorrectionLevel) -> None:
    order = torch.randperm(len(batch.mask_BT), generator=torch.Generator().manual_seed(seed))
    expected = rollout_correction(batch.logprobs_BT, batch.old_BT, batch.mask_BT, level=level)
    actual = rollout_correction(batch.logprobs_BT[order], batch.old_BT[order], batch.mask_BT[order], level=level)
    assert torch.allclose(actual.weights_BT, expected.weights_BT[order], rtol=0, atol=1e-12)
    assert actual.metrics == pytest.approx(expected.metrics, abs=1e-9)


@given(batch=batches())
def test_equal_log_probs_change_nothing(batch: Tokens) -> None:
    for level in LEVELS:
        for mode in MODES:
            actual = rollout_correction(batch.old_BT, batch.old_BT, batch.mask_BT, level=level, mode=mode)
            assert torch.equal(actual.weights_BT, batch.mask_BT)
            assert torch.equal(actual.mask_BT, batch.mask_BT)
            assert actual.metrics["rollout_corr/rollout_is_eff_sample_size"] == 1.0
            assert actual.metrics["rollout_corr/chi2_seq"] == 0.0


def test_boolean_mask_and_weights_without_gradient() -> None:
    old_BT = OLD_BT.clone().requires_grad_()
    actual = rollout_correction(old_BT, ROLLOUT_BT, MASK_BT.bool(), mode="reject", low=0.4)
    assert not actual.weights_BT.requires_grad
    assert actual.mask_BT.tolist() == [[False, True], [True, False]]
    assert actual.weights_BT.tolist() == [[0.0, 1.0], [1.0, 0.0]]


def test_invalid_arguments_are_rejected() -> None:
    with pytest.raises(AlignmentError, match="no token"):
        rollout_correction(OLD_BT, ROLLOUT_BT, torch.zeros(2, 2))
    with pytest.raises(ValueError, match="must be below"):
        rollout_correction(OLD_BT, ROLLOUT_BT, MASK_BT, mode="clamp", low=2.0, high=2.0)
    with pytest.raises(ValueError, match="'turn': one of token, sequence"):
        rollout_correction(OLD_BT, ROLLOUT_BT, MASK_BT, level="turn")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'cut': one of off, truncate, mask, clamp, reject"):
        rollout_correction(OLD_BT, ROLLOUT_BT, MASK_BT, mode="cut")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"mask_BT \[1, 2\]"):
        rollout_correction(OLD_BT, ROLLOUT_BT, MASK_BT[:1])


def test_proximal_policy_interpolates_by_the_lag() -> None:
    logprobs_BT = torch.tensor([[-1.0, -2.0], [-1.0, -2.0], [-1.0, -2.0]], requires_grad=True)
    rollout_logprobs_BT = torch.full((3, 2), -3.0)
    proximal_BT = proximal_loglinear(logprobs_BT, rollout_logprobs_BT, torch.tensor([0, 1, 3]))
    # α = 0, ½, ¾
    assert proximal_BT.tolist() == [[-3.0, -3.0], [-2.0, -2.5], [-1.5, -2.25]]
    assert not proximal_BT.requires_grad


def test_proximal_policy_rejects_invalid_lags() -> None:
    ones_BT = torch.ones(2, 3)
    with pytest.raises(ValueError, match="negative, got -1"):
        proximal_loglinear(ones_BT, ones_BT, torch.tensor([0, -1]))
    with pytest.raises(ValueError, match=r"lag_B \[3\]"):
        proximal_loglinear(ones_BT, ones_BT, torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match=r"rollout_logprobs_BT \[2, 1\]"):
        proximal_loglinear(ones_BT, ones_BT[:, :1], torch.tensor([0, 1]))


@given(batch=batches(), garbage=st.sampled_from(GARBAGE))
def test_proximal_policy_padding_does_not_matter(batch: Tokens, garbage: float) -> None:
    lag_B = torch.arange(len(batch.mask_BT))

    def loss(fill: float) -> Tensor:
        logprobs_BT, rollout_logprobs_BT = (
            fill_padding(x_BT, batch.mask_BT, fill) for x_BT in (batch.logprobs_BT, batch.old_BT)
        )
        proximal_BT = proximal_loglinear(logprobs_BT, rollout_logprobs_BT, lag_B)
        return policy_loss(logprobs_BT, proximal_BT, batch.advantages_BT, batch.mask_BT).loss

    assert torch.equal(loss(garbage), loss(0.0))
