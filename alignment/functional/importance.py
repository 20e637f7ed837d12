"""Importance weights for tokens that another version, or another engine, sampled."""

from typing import NamedTuple

import torch
from torch import Tensor

from alignment.config.algorithm import CorrectionLevel, CorrectionMode
from alignment.errors import AlignmentError
from alignment.functional.aggregation import apply_mask, check_literal, check_same_shape, masked_mean

LOG_RATIO_BOUND = 20.0  # e^20 is far beyond any cap, and still a finite float32


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """Return clamp(log π − log π', ±20), any shape.  As in verl `compute_policy_loss_vanilla`."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


class RolloutCorrection(NamedTuple):
    """A weight per token (0 outside the mask), the mask after rejection, and metrics of the engine–trainer mismatch."""

    weights_BT: Tensor
    mask_BT: Tensor
    metrics: dict[str, float]


@torch.no_grad()
def rollout_correction(
    old_logprobs_BT: Tensor,
    rollout_logprobs_BT: Tensor,
    mask_BT: Tensor,
    *,
    level: CorrectionLevel = "token",
    mode: CorrectionMode = "truncate",
    low: float = 0.0,
    high: float = 2.0,
) -> RolloutCorrection:
    """Return importance weights w = old / rollout, bounded by `mode`.  [B, T] → [B, T] each, constants.

    level  token: w = exp(clamp(log old − log rollout, ±20));  sequence: the same of the sum over a sequence's tokens,
           given to each of them.
    mode   truncate: min(w, high)   Espeholt et al., 2018; Yao et al., 2025 (TIS)
           mask: w where low ≤ w ≤ high, else 0   Ring-1T, 2025 (IcePop)
           clamp: clamp(w, low, high)
           reject: 1 where low ≤ w ≤ high; tokens (or sequences) outside leave the mask   Liu et al., 2025 (MIS)
           off: 1
    Rejected tokens have weight 0. Use these weights with the mask from *before* rejection: the loss then leaves the
    rejected tokens out and still divides by the count before rejection. Otherwise every remaining token would get a
    larger gradient.

    Metrics, under `rollout_corr/`. Of the raw ratios: kl = mean(log rollout − log old), k3_kl, chi2_token = mean(w²) −
    1 and chi2_seq (mean over sequences of the squared sequence ratio, minus 1), the perplexities of both (mean over
    sequences) and ppl_ratio, log_ppl_diff, the fractions of w above `high` and below `low` (1/high where low is 0) at
    `level`. Of the bounded weights: rollout_is_mean, _std, _max, _min and the effective sample size 1 / mean((w / mean
    w)²) in (0, 1]; rollout_rs_masked_fraction, the fraction of rejected tokens.

    Raises ValueError for an unknown level or mode, mismatched shapes and low ≥ high; AlignmentError for an empty
    mask.
    """
    check_literal("correction level", level, CorrectionLevel)
    check_literal("correction mode", mode, CorrectionMode)
    check_same_shape(old_logprobs_BT=old_logprobs_BT, rollout_logprobs_BT=rollout_logprobs_BT, mask_BT=mask_BT)
    if low >= high:
        raise ValueError(f"low ({low}) must be below high ({high})")
    if not mask_BT.any():
        raise AlignmentError("no token is inside the mask, so there is nothing to correct")
    old_logprobs_BT = apply_mask(old_logprobs_BT, mask_BT)
    rollout_logprobs_BT = apply_mask(rollout_logprobs_BT, mask_BT)
    log_ratio_BT = old_logprobs_BT - rollout_logprobs_BT
    if level == "sequence":
        log_ratio_BT = log_ratio_BT.sum(-1, keepdim=True).expand_as(log_ratio_BT)
    ratio_BT = clamp_log_ratio(log_ratio_BT).exp()
    within_BT = (ratio_BT >= low) & (ratio_BT <= high)
    remaining_BT = mask_BT * within_BT if mode == "reject" else mask_BT
    weights_BT = apply_mask(_weights(ratio_BT, within_BT, mode, low, high), remaining_BT)
    metrics = {
        **_divergence_metrics(old_logprobs_BT, rollout_logprobs_BT, mask_BT),
        **_out_of_bounds_fractions(ratio_BT, mask_BT, level, low, high),
        **_weight_metrics(weights_BT, mask_BT),
        "rollout_rs_masked_fraction": 1 - masked_mean(remaining_BT.to(ratio_BT.dtype), mask_BT),
    }
    values = torch.stack(list(metrics.values())).tolist()  # one transfer from the device, not twenty
    named = {f"rollout_corr/{name}": value for name, value in zip(metrics, values, strict=True)}
    return RolloutCorrection(weights_BT, remaining_BT, named)


@torch.no_grad()
def proximal_loglinear(logprobs_BT: Tensor, rollout_logprobs_BT: Tensor, lag_B: Tensor) -> Tensor:
    """Return log-probs between behaviour and current policy, without a forward pass.  [B, T] → [B, T], a constant.

    log prox = log rollout + α · (sg[log π] − log rollout), α = lag / (lag + 1).  `lag_B` [B] counts versions from the
    one that sampled the sequence to the one that this update starts from: 0 gives the behaviour policy itself.
    AReaL, 2025 (log-linear approximation of decoupled PPO, Hilton et al., 2022).
    Raises ValueError for a negative lag and mismatched shapes.
    """
    check_same_shape(logprobs_BT=logprobs_BT, rollout_logprobs_BT=rollout_logprobs_BT)
    if lag_B.shape != logprobs_BT.shape[:1]:
        raise ValueError(f"shapes do not match: lag_B {list(lag_B.shape)}, logprobs_BT {list(logprobs_BT.shape)}")
    if (lag_B < 0).any():
        raise ValueError(f"a lag cannot be negative, got {int(lag_B.min())}")
    lag_B1 = lag_B.to(rollout_logprobs_BT.dtype)[:, None]
    return rollout_logprobs_BT + lag_B1 / (lag_B1 + 1) * (logprobs_BT - rollout_logprobs_BT)


def _weights(ratio_BT: Tensor, within_BT: Tensor, mode: CorrectionMode, low: float, high: float) -> Tensor:
    if mode == "truncate":
        return ratio_BT.clamp(max=high)
    if mode == "clamp":
        return ratio_BT.clamp(low, high)
    if mode == "mask":
        return ratio_BT * within_BT
    return torch.ones_like(ratio_BT)


def _divergence_metrics(old_logprobs_BT: Tensor, rollout_logprobs_BT: Tensor, mask_BT: Tensor) -> dict[str, Tensor]:
    tokens_B = mask_BT.sum(-1)
    present_B = tokens_B > 0
    old_B = (old_logprobs_BT.sum(-1) / tokens_B)[present_B]
    rollout_B = (rollout_logprobs_BT.sum(-1) / tokens_B)[present_B]
    log_ratio_BT = clamp_log_ratio(old_logprobs_BT - rollout_logprobs_BT)
    sequence_B = clamp_log_ratio((old_logprobs_BT - rollout_logprobs_BT).sum(-1)[present_B])
    return {
        "kl": masked_mean(rollout_logprobs_BT - old_logprobs_BT, mask_BT),
        "k3_kl": masked_mean(log_ratio_BT.exp() - log_ratio_BT - 1, mask_BT),
        "chi2_token": masked_mean((2 * log_ratio_BT).exp(), mask_BT) - 1,
        "chi2_seq": (2 * sequence_B).exp().mean() - 1,
        "training_ppl": (-old_B).exp().mean(),
        "rollout_ppl": (-rollout_B).exp().mean(),
        "log_ppl_diff": (rollout_B - old_B).mean(),
        "ppl_ratio": (rollout_B - old_B).exp().mean(),
    }


def _out_of_bounds_fractions(
    ratio_BT: Tensor, mask_BT: Tensor, level: CorrectionLevel, low: float, high: float
) -> dict[str, Tensor]:
    if level == "sequence":  # count every sequence once, whatever its length
        ratio_BT, mask_BT = ratio_BT[:, :1], mask_BT.any(-1, keepdim=True)
    floor = low if low > 0 else 1 / high
    return {
        "rollout_is_ratio_fraction_high": masked_mean((ratio_BT > high).to(ratio_BT.dtype), mask_BT),
        "rollout_is_ratio_fraction_low": masked_mean((ratio_BT < floor).to(ratio_BT.dtype), mask_BT),
    }


def _weight_metrics(weights_BT: Tensor, mask_BT: Tensor) -> dict[str, Tensor]:
    present_BT = mask_BT.bool()
    mean = masked_mean(weights_BT, mask_BT)
    return {
        "rollout_is_mean": mean,
        "rollout_is_std": masked_mean((weights_BT - mean).square(), mask_BT).sqrt(),
        "rollout_is_max": weights_BT[present_BT].max(),
        "rollout_is_min": weights_BT[present_BT].min(),
        "rollout_is_eff_sample_size": mean.square() / masked_mean(weights_BT.square(), mask_BT).clamp(min=1e-30),
    }
