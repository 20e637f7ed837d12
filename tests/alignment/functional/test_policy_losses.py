"""The policy losses: examples by hand, and a plain loop over tokens in float64, gradients included."""

import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from alignment.config.policy_gradient_algorithms import PolicyLossKind
from alignment.functional import policy_loss
from tests.support.random_batches import GARBAGE, Tokens, batches, fill_padding, rows, tokens, with_gradient

KINDS = get_args(PolicyLossKind)
LOW, HIGH, C = 0.2, 0.3, 1.6  # near enough to 1 for every clip to act on random tokens
CLIP: dict[str, Any] = {"clip_low": LOW, "clip_high": HIGH, "clip_c": C}


def token_result(logprob: float, old: float, advantage: float, **options: Any) -> tuple[float, float, float, float]:
    """Return the loss of one token, its gradient by the log-prob, and the two clip indicators."""
    logprobs_BT = torch.tensor([[logprob]], dtype=torch.float64, requires_grad=True)
    pg = policy_loss(
        logprobs_BT,
        torch.tensor([[old]], dtype=torch.float64),
        torch.tensor([[advantage]], dtype=torch.float64),
        torch.ones(1, 1),
        **options,
    )
    pg.loss.backward()
    assert logprobs_BT.grad is not None
    assert pg.loss.item() == pg.loss_BT.item()
    return pg.loss.item(), logprobs_BT.grad.item(), pg.clipped_BT.item(), pg.clipped_lower_BT.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped", "clipped_lower"),
    [
        (1.1, 1.0, -1.1, -1.1, 0, 0),  # inside the clip: −A·r
        (1.5, 1.0, -1.3, 0.0, 1, 0),  # max(−1.5, −1.3)
        (0.5, 1.0, -0.5, -0.5, 0, 0),  # max(−0.5, −0.8)
        (0.5, -2.0, 1.6, 0.0, 1, 0),  # max(1.0, 2·0.8)
        (2.0, -1.0, 2.0, 2.0, 0, 0),  # max(2.0, 1.3), below c = 3
        (5.0, -1.0, 3.0, 0.0, 0, 1),  # max(5.0, 1.3) = 5, limited to c·|A| = 3
        (5.0, 0.0, 0.0, 0.0, 0, 0),
    ],
)
def test_ppo_by_hand(
    ratio: float, advantage: float, loss: float, gradient: float, clipped: int, clipped_lower: int
) -> None:
    actual = token_result(-1.0 + math.log(ratio), -1.0, advantage, clip_high=HIGH)
    assert actual == pytest.approx((loss, gradient, clipped, clipped_lower))


def test_default_is_ppo_with_dual_clip() -> None:
    assert token_result(math.log(1.25), 0.0, 1.0) == pytest.approx((-1.2, 0.0, 1, 0))
    assert token_result(math.log(0.75), 0.0, -1.0) == pytest.approx((0.8, 0.0, 1, 0))
    assert token_result(math.log(4), 0.0, -1.0) == pytest.approx((3.0, 0.0, 0, 1))


def test_dppo_bound_is_inclusive() -> None:
    for advantage in (1.0, -1.0):
        assert token_result(-1.0, -1.0, advantage, kind="dppo_tv", clip_low=0.0, clip_high=0.0)[1:] == (
            -advantage,
            0,
            0,
        )


def test_loss_is_unbounded_without_dual_clip() -> None:
    assert token_result(-1.0 + math.log(5), -1.0, -1.0, clip_c=None) == pytest.approx((5.0, 5.0, 0, 0))


@pytest.mark.parametrize(
    ("kind", "ratio", "advantage", "loss", "gradient", "clipped", "clipped_lower"),
    [
        ("cispo", 1.1, 2.0, 2.2, -2.2, 0, 0),  # −1.1 · 2 · log π, log π = −1
        ("cispo", 4.0, 2.0, 2.6, -2.6, 1, 0),  # r clipped to 1.3; the gradient stays
        ("cispo", 0.1, -1.0, -0.8, 0.8, 1, 0),  # r clipped to 0.8
        ("reinforce", 4.0, 2.0, 2.0, -2.0, 0, 0),  # the ratio has no effect
        # log π = −1, e^−1 = 0.3679; old = e^−1 / r: a change of 0.3679 · (1 − 1/r)
        ("dppo_tv", 1.1, 2.0, 2.2, -2.2, 0, 0),  # + 0.033
        ("dppo_tv", 2.0, 2.0, 3.2, -3.2, 0, 1),  # + 0.184: valid, r capped at 1.6
        ("dppo_tv", 8.0, 2.0, 0.0, 0.0, 1, 0),  # + 0.322, more than 0.3
        ("dppo_tv", 8.0, -2.0, -3.2, 3.2, 0, 1),  # + 0.322 with A < 0: a step in this direction is not limited
        ("dppo_tv", 0.6, -2.0, 0.0, 0.0, 1, 0),  # − 0.245, more than 0.2
        ("dppo_tv", 0.7, -2.0, -1.4, 1.4, 0, 0),  # − 0.158
        ("dppo_tv", 8.0, 0.0, 0.0, 0.0, 0, 1),  # A = 0 counts as A < 0
    ],
)
def test_losses_on_the_log_prob_by_hand(
    kind: PolicyLossKind, ratio: float, advantage: float, loss: float, gradient: float, clipped: int, clipped_lower: int
) -> None:
    actual = token_result(-1.0, -1.0 - math.log(ratio), advantage, kind=kind, **CLIP)
    assert actual == pytest.approx((loss, gradient, clipped, clipped_lower))


def test_sapo_by_hand() -> None:
    # r = 2, τ = 1: −σ(1)·4 = −2.9242343;  dσ(τ(r−1))·4/τ by log π: r·4·σ(1)(1−σ(1)) = 8·0.1966119
    assert token_result(math.log(2), 0.0, 1.0, kind="sapo") == pytest.approx((-2.9242343, -1.5728955, 0, 0))
    # A < 0, τ = 1.05: σ(1.05)·4/1.05 = 2.8220995
    assert token_result(math.log(2), 0.0, -1.0, kind="sapo")[0] == pytest.approx(4 / 1.05 / (1 + math.exp(-1.05)))
    assert token_result(math.log(2), 0.0, -1.0, kind="sapo", tau_neg=2.0)[0] == pytest.approx(2 / (1 + math.exp(-2)))
    assert token_result(math.log(2), 0.0, 1.0, kind="sapo", tau_pos=2.0)[0] == pytest.approx(-2 / (1 + math.exp(-2)))


def test_gspo_by_hand() -> None:
    old_BT = torch.full((2, 3), -1.0, dtype=torch.float64)
    ratios_BT = torch.tensor([[1.1, 1.21, 99.0], [4.0, 1.0, 0.5]], dtype=torch.float64)
    mask_BT = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
    advantages_BT = torch.tensor([[2.0], [1.0]], dtype=torch.float64).expand(2, 3)
    # s = √(1.1·1.21) = 1.1^1.5 = 1.1536897, inside 1.3;  (4·1·½)^⅓ = 2^⅓ = 1.26, inside; clipped by 0.2
    logprobs_BT = (old_BT + ratios_BT.log()).requires_grad_()
    pg = policy_loss(
        logprobs_BT, old_BT, advantages_BT, mask_BT, kind="gspo", clip_high=0.2, aggregation="seq-mean-token-mean"
    )
    assert pg.loss_BT.tolist() == [pytest.approx([-2.3073794, -2.3073794, 0.0]), pytest.approx([-1.2, -1.2, -1.2])]
    assert pg.clipped_BT.tolist() == [[0, 0, 0], [1, 1, 1]]
    assert not pg.clipped_lower_BT.any()
    assert pg.loss.item() == pytest.approx((-2.3073794 - 1.2) / 2)
    pg.loss.backward()
    # the gradient of each token of the first sequence is s·A/n / 2 sequences; the second sequence is clipped
    assert logprobs_BT.grad is not None
    assert logprobs_BT.grad.tolist() == [pytest.approx([-0.57684486, -0.57684486, 0.0]), [0.0, 0.0, 0.0]]


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_ratio_stays_finite(kind: PolicyLossKind) -> None:
    for logprob, old in ((-0.1, -500.0), (-500.0, -0.1)):
        for advantage in (1.0, -1.0):
            assert all(
                map(
                    math.isfinite,
                    token_result(logprob, old, advantage, kind=kind, clip_c=None if kind == "ppo" else 3.0),
                )
            )


def test_the_ratio_is_bounded_by_e_to_the_20_and_gspos_by_e_to_the_10() -> None:
    assert token_result(0.0, -500.0, -1.0, clip_c=None)[0] == pytest.approx(math.exp(20))
    assert token_result(0.0, -500.0, -1.0, kind="gspo")[0] == pytest.approx(math.exp(10))


def clip(ratio: float, low: float, high: float) -> float:
    return min(max(ratio, 1 - low), 1 + high)


def expected_token_result(
    kind: str, logprob: float, old: float, advantage: float, sequence: float
) -> tuple[float, float, bool]:
    """Return the loss, its derivative by the log-prob, and whether it is clipped. `sequence`: the mean log-ratio."""
    ratio = math.exp(sequence if kind == "gspo" else logprob - old)
    if kind in ("ppo", "gspo"):
        loss = max(-advantage * ratio, -advantage * clip(ratio, LOW, HIGH))
        clipped = loss != -advantage * ratio
        if kind == "ppo" and advantage < 0:
            loss = min(loss, -advantage * C)
        return loss, -advantage * ratio if loss == -advantage * ratio else 0.0, clipped
    if kind == "cispo":
        weight = clip(ratio, LOW, HIGH)
        return -weight * advantage * logprob, -weight * advantage, weight != ratio
    if kind == "sapo":
        tau = 1.0 if advantage > 0 else 1.05
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        return -advantage * gate * 4 / tau, -advantage * 4 * gate * (1 - gate) * ratio, False
    if kind == "reinforce":
        return -advantage * logprob, -advantage, False
    probability_change = math.exp(logprob) - math.exp(old)
    if not (probability_change <= HIGH if advantage > 0 else probability_change >= -LOW):
        return 0.0, 0.0, True
    return -advantage * min(ratio, C) * logprob, -advantage * min(ratio, C), False


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 2**32))
def test_losses_and_gradients_agree_with_a_loop_over_tokens(kind: PolicyLossKind, seed: int) -> None:
    batch = tokens(seed, 4, 6)
    logprobs_BT = batch.logprobs_BT.clone().requires_grad_()
    pg = policy_loss(
        logprobs_BT,
        batch.old_BT,
        batch.advantages_BT,
        batch.mask_BT,
        kind=kind,
        rollout_weights_BT=batch.weights_BT,
        aggregation="token-sum",
        **CLIP,
    )
    pg.loss.backward()
    assert logprobs_BT.grad is not None
    log_ratio_BT = (batch.logprobs_BT - batch.old_BT) * batch.mask_BT
    mean_BT = (log_ratio_BT.sum(-1) / batch.mask_BT.sum(-1).clamp(min=1))[:, None].expand_as(log_ratio_BT)
    inputs = rows(batch.logprobs_BT, batch.old_BT, batch.advantages_BT, mean_BT, batch.weights_BT, batch.mask_BT)
    actual = rows(pg.loss_BT, logprobs_BT.grad, pg.clipped_BT)
    total = 0.0
    for (*token, weight, apply_mask), (loss, gradient, clipped) in zip(inputs, actual, strict=True):
        expected = expected_token_result(kind, *token) if apply_mask else (0.0, 0.0, False)
        assert (loss, gradient) == pytest.approx((weight * expected[0], weight * expected[1]), abs=1e-12)
        assert clipped == expected[2]
        total += weight * expected[0]
    assert pg.loss.item() == pytest.approx(total, abs=1e-11)


@pytest.mark.parametrize("kind", KINDS)
@given(batch=batches())
def test_every_kind_has_the_policy_gradient_on_policy(kind: PolicyLossKind, batch: Tokens) -> None:
    def loss(logprobs_BT: Tensor) -> Tensor:
        pg = policy_loss(
            logprobs_BT, batch.old_BT, batch.advantages_BT, batch.mask_BT, kind=kind, aggregation="token-sum"
        )
        if kind in ("ppo", "gspo"):  # the ratio is exactly 1
            assert torch.equal(pg.loss_BT, -batch.advantages_BT * batch.mask_BT)
        assert not pg.clipped_BT.any()
        assert not pg.clipped_lower_BT.any()
        return pg.loss

    _, gradient_BT = with_gradient(loss, batch.old_BT)
    assert torch.allclose(gradient_BT, -batch.advantages_BT * batch.mask_BT, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["ppo", "gspo"])
@given(batch=batches())
def test_only_clipped_tokens_have_no_gradient(kind: PolicyLossKind, batch: Tokens) -> None:
    logprobs_BT = batch.logprobs_BT.clone().requires_grad_()
    pg = policy_loss(logprobs_BT, batch.old_BT, batch.advantages_BT, batch.mask_BT, kind=kind, **CLIP)
    pg.loss.backward()
    assert logprobs_BT.grad is not None
    decided_BT = (pg.clipped_BT + pg.clipped_lower_BT).bool()
    assert torch.equal(logprobs_BT.grad == 0, decided_BT | ~batch.mask_BT.bool())


@pytest.mark.parametrize("kind", KINDS)
@given(batch=batches(), garbage=st.sampled_from(GARBAGE))
def test_padding_content_does_not_matter(kind: PolicyLossKind, batch: Tokens, garbage: float) -> None:
    mask_BT = batch.mask_BT

    def results_with_padding(fill: float) -> tuple[Tensor, ...]:
        old_BT, advantages_BT, weights_BT = (
            fill_padding(x_BT, mask_BT, fill) for x_BT in (batch.old_BT, batch.advantages_BT, batch.weights_BT)
        )
        logprobs_BT = fill_padding(batch.logprobs_BT, mask_BT, fill).requires_grad_()
        pg = policy_loss(logprobs_BT, old_BT, advantages_BT, mask_BT, kind=kind, rollout_weights_BT=weights_BT, **CLIP)
        pg.loss.backward()
        assert logprobs_BT.grad is not None
        return (*pg, logprobs_BT.grad)

    for with_garbage, with_zeros in zip(results_with_padding(garbage), results_with_padding(0.0), strict=True):
        assert torch.equal(with_garbage, with_zeros)
    assert not results_with_padding(garbage)[-1][mask_BT == 0].any()


@pytest.mark.parametrize("kind", KINDS)
@given(batch=batches(), seed=st.integers(0, 2**32))
def test_permuting_sequences_permutes_the_losses(kind: PolicyLossKind, batch: Tokens, seed: int) -> None:
    order = torch.randperm(len(batch.mask_BT), generator=torch.Generator().manual_seed(seed))
    expected = policy_loss(batch.logprobs_BT, batch.old_BT, batch.advantages_BT, batch.mask_BT, kind=kind)
    actual = policy_loss(
        batch.logprobs_BT[order], batch.old_BT[order], batch.advantages_BT[order], batch.mask_BT[order], kind=kind
    )
    assert torch.allclose(actual.loss, expected.loss, rtol=0, atol=1e-12)
    assert torch.allclose(actual.loss_BT, expected.loss_BT[order], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@given(batch=batches(), size=st.integers(1, 4), aggregation=st.sampled_from(["token-mean", "seq-mean-token-mean"]))
def test_micro_batches_add_up_to_loss_and_gradient(
    kind: PolicyLossKind, batch: Tokens, size: int, aggregation: Any
) -> None:
    mask_BT = batch.mask_BT
    count = mask_BT.sum() if aggregation == "token-mean" else (mask_BT.sum(-1) > 0).sum()

    def loss_of_batch(logprobs_BT: Tensor) -> Tensor:
        return policy_loss(
            logprobs_BT, batch.old_BT, batch.advantages_BT, mask_BT, kind=kind, aggregation=aggregation
        ).loss

    def sum_of_parts(logprobs_BT: Tensor) -> Tensor:
        split = zip(*(x.split(size) for x in (logprobs_BT, batch.old_BT, batch.advantages_BT, mask_BT)), strict=True)
        losses = [policy_loss(*part, kind=kind, aggregation=aggregation, denominator=count).loss for part in split]
        return torch.stack(losses).sum()

    actual, expected = with_gradient(sum_of_parts, batch.logprobs_BT), with_gradient(loss_of_batch, batch.logprobs_BT)
    for part, full in zip(actual, expected, strict=True):
        assert torch.allclose(part, full, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_stays_float32_and_agrees_with_float64(kind: PolicyLossKind) -> None:
    batch = tokens(1, 4, 6)
    narrow = [x_BT.float() for x_BT in (batch.logprobs_BT, batch.old_BT, batch.advantages_BT, batch.mask_BT)]
    actual = policy_loss(*narrow, kind=kind)
    expected = policy_loss(batch.logprobs_BT, batch.old_BT, batch.advantages_BT, batch.mask_BT.bool(), kind=kind)
    assert {x.dtype for x in actual} == {torch.float32}
    assert {x.dtype for x in expected} == {torch.float64}
    assert actual.loss.item() == pytest.approx(expected.loss.item(), abs=1e-6)


def test_only_the_log_probs_carry_gradient() -> None:
    logprobs_BT, *constants = (torch.randn(2, 3).requires_grad_() for _ in range(4))
    old_BT, advantages_BT, weights_BT = constants
    policy_loss(logprobs_BT, old_BT, advantages_BT, torch.ones(2, 3), rollout_weights_BT=weights_BT).loss.backward()
    assert logprobs_BT.grad is not None
    assert all(constant.grad is None for constant in constants)


def test_horizon_reaches_the_aggregation() -> None:
    ones_BT = torch.ones(2, 4)
    pg = policy_loss(ones_BT, ones_BT, ones_BT, ones_BT, aggregation="seq-mean-token-sum-norm", horizon=16)
    assert pg.loss.item() == -0.25  # −4 a sequence, over 16


def test_unknown_kind_error_lists_the_kinds() -> None:
    ones_BT = torch.ones(1, 1)
    with pytest.raises(ValueError, match="'pppo': one of ppo, gspo, cispo, sapo, reinforce, dppo_tv"):
        policy_loss(ones_BT, ones_BT, ones_BT, ones_BT, kind="pppo")  # type: ignore[arg-type]


def test_dual_clip_below_one_is_rejected() -> None:
    ones_BT = torch.ones(1, 1)
    with pytest.raises(ValueError, match=r"above 1, not 1\.0"):
        policy_loss(ones_BT, ones_BT, ones_BT, ones_BT, clip_c=1.0)


def test_mismatched_shapes_are_named() -> None:
    ones_BT = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"logprobs_BT \[2, 3\], old_logprobs_BT \[2, 3\], advantages_BT \[2, 1\]"):
        policy_loss(ones_BT, ones_BT, ones_BT[:, :1], ones_BT)
    with pytest.raises(ValueError, match=r"rollout_weights_BT \[1, 3\]"):
        policy_loss(ones_BT, ones_BT, ones_BT, ones_BT, rollout_weights_BT=ones_BT[:1])
