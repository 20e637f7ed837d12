"""The formulas, as pure functions on tensors.

Shapes: B sequences, T output tokens (right-padded); `mask_BT` is 1 where there is a token, 0 where there is
padding. `parent` is the policy as the trainer scores it before the update, `rollout` what the engine said.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from alignment.config import Aggregation, KLKind

LOG_RATIO_BOUND = 20.0  # e^20 is far beyond any cap, and still a finite float32


class PolicyLoss(NamedTuple):
    """A loss per token, and where the clip was what decided it."""

    loss_BT: Tensor
    clipped_BT: Tensor
    clipped_lower_BT: Tensor


class RolloutCorrection(NamedTuple):
    """A weight per token for what the engine sampled, and how far the engine was from the trainer."""

    weights_BT: Tensor
    metrics: dict[str, float]


def masked_mean(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Σ(x·m) / Σm.  [B, T] → scalar."""
    return (x_BT * mask_BT).sum() / mask_BT.sum()


def whiten(x_BT: Tensor, mask_BT: Tensor, *, centre: bool = True) -> Tensor:
    """(x − mean) · rsqrt(var + 1e-8) over the masked tokens, var with Bessel's correction; 0 in the padding.

    [B, T] → [B, T].  As in PPO implementations since Ziegler et al., 2019 (verl `masked_whiten`). With
    `centre=False` x is only scaled, x · rsqrt(var + 1e-8): for what has been centred by a baseline already.
    """
    count = mask_BT.sum()
    centred_BT = (x_BT - masked_mean(x_BT, mask_BT)) * mask_BT
    variance = centred_BT.square().sum() / (count - 1)
    return (centred_BT if centre else x_BT * mask_BT) * torch.rsqrt(variance + 1e-8)


def running_baseline(rewards_B: Tensor, baseline: float, decay: float) -> tuple[Tensor, float]:
    """A = R − b, and only then b ← d·b + (1−d)·mean(R): a reward never weighs on its own baseline.

    [B] → [B].  Liu et al., 2025 (SPIRAL, role-conditioned advantage estimation).
    """
    return rewards_B - baseline, decay * baseline + (1 - decay) * float(rewards_B.mean())


def policy_loss(
    logprobs_BT: Tensor,
    parent_BT: Tensor,
    advantages_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
    weights_BT: Tensor,
) -> PolicyLoss:
    """Dual-clip PPO, decoupled from the behaviour policy by a weight.  [B, T] → [B, T].

    r = exp(clamp(π − parent, ±20));  L = max(−A·r, −A·clip(r, 1−ε_low, 1+ε_high));
    where A < 0: L = min(L, −A·c);  loss = weight · L.
    Schulman et al., 2017; Ye et al., 2020 (dual clip); Hilton et al., 2022 (decoupled).
    """
    ratio_BT = (logprobs_BT - parent_BT).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    free_BT = -advantages_BT * ratio_BT
    bounded_BT = -advantages_BT * ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    upper_BT = torch.maximum(free_BT, bounded_BT)
    lower_BT = -advantages_BT * clip_c
    negative_BT = advantages_BT < 0
    loss_BT = torch.where(negative_BT, torch.minimum(upper_BT, lower_BT), upper_BT)
    return PolicyLoss(
        weights_BT * loss_BT,
        (bounded_BT > free_BT).float().detach(),
        (negative_BT & (upper_BT > lower_BT)).float().detach(),
    )


def aggregate(loss_BT: Tensor, mask_BT: Tensor, mode: Aggregation, *, denominator: float) -> Tensor:
    """One number from a loss per token.  [B, T] → scalar.

    `denominator` counts over the whole minibatch, all micro-batches and ranks: tokens for token-mean,
    sequences for the other two. The parts of a minibatch then add up to the same loss however it is cut.
    token-mean: Σ l·m / tokens.  seq-mean-token-sum: Σ_i Σ_t l·m / B.
    seq-mean-token-mean: Σ_i (Σ_t l·m / n_i) / B.
    """
    if mode == "seq-mean-token-mean":
        sequence_B = (loss_BT * mask_BT).sum(-1) / (mask_BT.sum(-1) + 1e-8)
        return sequence_B.sum() / denominator
    return (loss_BT * mask_BT).sum() / denominator


def kl_estimate(logprobs_BT: Tensor, reference_BT: Tensor, kind: KLKind) -> Tensor:
    """KL(π ‖ reference) per token, from samples of π.  [B, T] → [B, T].  Schulman, 2020.

    k1 = π − ref;  k2 = ½(π − ref)²;  k3 = e^d − d − 1 with d = clamp(ref − π, ±20), the result within ±10.
    """
    if kind == "k1":
        return logprobs_BT - reference_BT
    if kind == "k2":
        return 0.5 * (logprobs_BT - reference_BT).square()
    difference_BT = (reference_BT - logprobs_BT).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return (difference_BT.exp() - difference_BT - 1).clamp(-10.0, 10.0)


def rollout_correction(parent_BT: Tensor, rollout_BT: Tensor, mask_BT: Tensor, *, cap: float) -> RolloutCorrection:
    """Truncated importance weights, token by token.  [B, T] → [B, T].

    w = min(exp(clamp(parent − rollout, ±20)), cap).  Espeholt et al., 2018; Yao et al., 2025 (TIS).
    Metrics: kl = mean(rollout − parent); chi2_token = mean(w²) − 1 before truncation; the mean, extremes and
    effective sample size 1 / mean((w / mean w)²) of the truncated weights, which are those that act.
    """
    log_ratio_BT = ((parent_BT - rollout_BT) * mask_BT).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    raw_BT = log_ratio_BT.exp()
    weights_BT = raw_BT.clamp(max=cap) * mask_BT
    present = mask_BT.bool()
    mean = masked_mean(weights_BT, mask_BT)
    metrics = {
        "rollout_corr/kl": -masked_mean(log_ratio_BT, mask_BT),
        "rollout_corr/k3_kl": masked_mean(raw_BT - log_ratio_BT - 1, mask_BT),
        "rollout_corr/chi2_token": masked_mean(raw_BT.square(), mask_BT) - 1,
        "rollout_corr/rollout_is_mean": mean,
        "rollout_corr/rollout_is_max": weights_BT[present].max(),
        "rollout_corr/rollout_is_min": weights_BT[present].min(),
        "rollout_corr/rollout_is_eff_sample_size": 1 / masked_mean((weights_BT / mean).square(), mask_BT),
        "rollout_corr/rollout_is_ratio_fraction_high": masked_mean((raw_BT > cap).float(), mask_BT),
    }
    return RolloutCorrection(weights_BT, {name: float(value) for name, value in metrics.items()})
