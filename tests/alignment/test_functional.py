"""The formulas, against numbers worked out by hand and against a plain loop over tokens."""

import math

import pytest
import torch
from torch import Tensor

from alignment.functional import (
    aggregate,
    kl_estimate,
    policy_loss,
    rollout_correction,
    running_baseline,
    whiten,
)

CLIP = {"clip_low": 0.2, "clip_high": 0.3, "clip_c": 3.0}


def test_whitening_ignores_padding_and_uses_the_unbiased_variance() -> None:
    x_BT = torch.tensor([[1.0, 3.0], [5.0, 99.0]])
    mask_BT = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    # mean = 9/3 = 3;  var = (4 + 0 + 4) / (3 − 1) = 4;  (x − 3) / 2
    assert torch.allclose(whiten(x_BT, mask_BT), torch.tensor([[-1.0, 0.0], [1.0, 0.0]]))


def test_the_baseline_moves_only_after_it_was_used() -> None:
    advantages_B, baseline = running_baseline(torch.tensor([1.0, -1.0, 1.0]), 0.5, 0.9)
    assert advantages_B.tolist() == [0.5, -1.5, 0.5]
    # 0.9 · 0.5 + 0.1 · 1/3
    assert baseline == pytest.approx(0.45 + 0.1 / 3)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped", "clipped_lower"),
    [
        (1.1, 1.0, -1.1, 0, 0),  # inside the clip: −A·r
        (1.5, 1.0, -1.3, 1, 0),  # max(−1.5, −1.3)
        (0.5, 1.0, -0.5, 0, 0),  # max(−0.5, −0.8)
        (0.5, -2.0, 1.6, 1, 0),  # max(1.0, 2·0.8)
        (2.0, -1.0, 2.0, 0, 0),  # max(2.0, 1.3), below c = 3
        (5.0, -1.0, 3.0, 0, 1),  # max(5.0, 1.3) = 5, cut by c·|A| = 3
        (5.0, 0.0, 0.0, 0, 0),
    ],
)
def test_the_clipped_loss_by_hand(
    ratio: float, advantage: float, loss: float, clipped: int, clipped_lower: int
) -> None:
    parent_BT = torch.tensor([[-1.0]])
    pg = policy_loss(
        parent_BT + math.log(ratio),
        parent_BT,
        torch.tensor([[advantage]]),
        weights_BT=torch.tensor([[1.0]]),
        **CLIP,
    )
    assert pg.loss_BT.item() == pytest.approx(loss)
    assert (pg.clipped_BT.item(), pg.clipped_lower_BT.item()) == (clipped, clipped_lower)


def test_a_runaway_ratio_stays_finite() -> None:
    pg = policy_loss(
        torch.tensor([[0.0]]),
        torch.tensor([[-500.0]]),
        torch.tensor([[1.0]]),
        weights_BT=torch.ones(1, 1),
        **CLIP,
    )
    assert pg.loss_BT.item() == pytest.approx(-1.3)


def test_losses_agree_with_a_loop_over_tokens() -> None:
    torch.manual_seed(3)
    parent_BT, advantages_BT = -torch.rand(5, 7, dtype=torch.float64), torch.randn(5, 7, dtype=torch.float64)
    logprobs_BT = (parent_BT + 0.8 * torch.randn(5, 7, dtype=torch.float64)).requires_grad_()
    weights_BT = torch.rand(5, 7, dtype=torch.float64)
    pg = policy_loss(logprobs_BT, parent_BT, advantages_BT, weights_BT=weights_BT, **CLIP)

    def by_token(logprob: float, parent: float, advantage: float, weight: float) -> tuple[float, float]:
        """Loss, and its derivative by the log-prob: −A·r where neither clip is what decided."""
        ratio = math.exp(logprob - parent)
        loss = max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.3))
        if advantage < 0:
            loss = min(loss, -advantage * 3.0)
        return weight * loss, weight * -advantage * ratio if loss == -advantage * ratio else 0.0

    tensors = (logprobs_BT.detach(), parent_BT, advantages_BT, weights_BT)
    wanted = [by_token(*values) for values in zip(*(t.flatten().tolist() for t in tensors), strict=True)]
    pg.loss_BT.sum().backward()
    assert logprobs_BT.grad is not None
    assert pg.loss_BT.flatten().tolist() == pytest.approx([loss for loss, _ in wanted], abs=1e-12)
    assert logprobs_BT.grad.flatten().tolist() == pytest.approx([slope for _, slope in wanted], abs=1e-12)


LOSS_BT = torch.tensor([[1.0, 2.0, 3.0], [4.0, 9.0, 9.0]])
MASK_BT = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])


def test_aggregation_by_hand() -> None:
    # tokens: (1 + 2 + 3 + 4) / 4;  sums: (6 + 4) / 2;  means: (6/3 + 4/1) / 2
    assert aggregate(LOSS_BT, MASK_BT, "token-mean", denominator=4).item() == 2.5
    assert aggregate(LOSS_BT, MASK_BT, "seq-mean-token-sum", denominator=2).item() == 5.0
    assert aggregate(LOSS_BT, MASK_BT, "seq-mean-token-mean", denominator=2).item() == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("mode", "denominator"), [("token-mean", 4), ("seq-mean-token-sum", 2), ("seq-mean-token-mean", 2)]
)
def test_the_parts_of_a_minibatch_add_up(mode: str, denominator: int) -> None:
    whole = aggregate(LOSS_BT, MASK_BT, mode, denominator=denominator)
    parts = [aggregate(LOSS_BT[i : i + 1], MASK_BT[i : i + 1], mode, denominator=denominator) for i in (0, 1)]
    assert torch.allclose(whole, parts[0] + parts[1])


def test_kl_estimates_by_hand() -> None:
    logprobs_BT, reference_BT = torch.tensor([[math.log(0.5)]]), torch.tensor([[math.log(0.25)]])

    def estimate(kind: str) -> Tensor:
        return kl_estimate(logprobs_BT, reference_BT, kind)

    # d = ln 2:  d;  d²/2;  e^−d + d − 1 = 0.5 + 0.6931 − 1
    assert estimate("k1").item() == pytest.approx(0.693147, abs=1e-6)
    assert estimate("k2").item() == pytest.approx(0.240227, abs=1e-6)
    assert estimate("k3").item() == pytest.approx(0.193147, abs=1e-6)


def test_k3_is_bounded() -> None:
    assert kl_estimate(torch.tensor([[-30.0]]), torch.tensor([[0.0]]), "k3").item() == 10.0


def test_rollout_weights_are_truncated_token_by_token() -> None:
    log4, log2 = math.log(4), math.log(2)
    correction = rollout_correction(
        torch.tensor([[log4, 0.0], [-log2, 5.0]]),
        torch.zeros(2, 2),
        torch.tensor([[1.0, 1.0], [1.0, 0.0]]),
        cap=2.0,
    )
    assert torch.allclose(correction.weights_BT, torch.tensor([[2.0, 1.0], [0.5, 0.0]]))
    # kl = −(ln 4 + 0 − ln 2)/3;  chi2 = (16 + 1 + ¼)/3 − 1;  ESS = (3.5/3)² / ((4 + 1 + ¼)/3)
    assert correction.metrics["rollout_corr/kl"] == pytest.approx(-log2 / 3)
    assert correction.metrics["rollout_corr/chi2_token"] == pytest.approx(4.75)
    assert correction.metrics["rollout_corr/rollout_is_mean"] == pytest.approx(3.5 / 3)
    assert correction.metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(7 / 9)
    assert correction.metrics["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(1 / 3)
