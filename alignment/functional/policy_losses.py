"""Policy losses, the loss per token of every kind, weighted and aggregated, and the loss of the critic.

Notation: π the policy, `old` the proximal policy, r = exp(clamp(log π − log old, ±20)), A the advantage, sg[·]
stop-gradient, ε_low, ε_high and c the settings `clip_low`, `clip_high` and `clip_c`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from alignment.config.algorithm import Aggregation, PolicyLossKind
from alignment.functional.aggregation import aggregate, apply_mask, check_literal, check_same_shape
from alignment.functional.importance import clamp_log_ratio

MAX_LOG_SEQUENCE_RATIO = 10.0  # verl's bound for GSPO's mean log-ratio


class Tokens(NamedTuple):
    """[B, T] each; `logprobs_BT` carries the gradient, the others are constants."""

    logprobs_BT: Tensor
    old_logprobs_BT: Tensor
    advantages_BT: Tensor
    mask_BT: Tensor


class LossSettings(NamedTuple):
    """The settings of every kind, named as in `policy_loss`. `clip_c` is the dual clip or the ratio cap."""

    clip_low: float
    clip_high: float
    clip_c: float | None
    tau_pos: float
    tau_neg: float


class TokenLoss(NamedTuple):
    """A loss per token, and 1 where the loss is the clipped one."""

    loss_BT: Tensor
    clipped_BT: Tensor
    clipped_lower_BT: Tensor


def ppo(tokens: Tokens, settings: LossSettings) -> TokenLoss:
    """L = max(−A·r, −A·clip(r, 1−ε_low, 1+ε_high));  where A < 0: L = min(L, −A·c).

    Schulman et al., 2017; Ye et al., 2020 (dual clip, c > 1); Yu et al., 2025 (DAPO: ε_high > ε_low).
    """
    clip_c, advantages_BT = settings.clip_c, tokens.advantages_BT
    if clip_c is not None and clip_c <= 1:
        raise ValueError(f"clip_c bounds the ratio where the advantage is negative and must be above 1, not {clip_c}")
    upper = _clipped(_ratio(tokens), advantages_BT, settings)
    if clip_c is None:
        return upper
    lower_BT = -advantages_BT * clip_c
    negative_BT = advantages_BT < 0
    loss_BT = torch.where(negative_BT, torch.minimum(upper.loss_BT, lower_BT), upper.loss_BT)
    return TokenLoss(loss_BT, upper.clipped_BT, negative_BT & (upper.loss_BT > lower_BT))


def gspo(tokens: Tokens, settings: LossSettings) -> TokenLoss:
    """PPO's clip on the sequence's ratio s_i = exp(mean_t(log π − log old)). Each of its tokens has the ratio
    exp(sg[log s_i] + log π − sg[log π]); log s_i is at most 10. No dual clip. Zheng et al., 2025.
    """
    logprobs_BT = tokens.logprobs_BT
    log_ratio_B = (logprobs_BT - tokens.old_logprobs_BT).detach().sum(-1) / tokens.mask_BT.sum(-1).clamp(min=1)
    log_ratio_BT = log_ratio_B[:, None] + logprobs_BT - logprobs_BT.detach()
    return _clipped(log_ratio_BT.clamp(max=MAX_LOG_SEQUENCE_RATIO).exp(), tokens.advantages_BT, settings)


def cispo(tokens: Tokens, settings: LossSettings) -> TokenLoss:
    """L = −sg[clip(r, 1−ε_low, 1+ε_high)] · A · log π: clipped tokens keep a gradient.  MiniMax, 2025 (M1)."""
    ratio_BT = _ratio(tokens).detach()
    clipped_BT = ratio_BT.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return TokenLoss(
        -clipped_BT * tokens.advantages_BT * tokens.logprobs_BT, ratio_BT != clipped_BT, torch.zeros_like(ratio_BT)
    )


def sapo(tokens: Tokens, settings: LossSettings) -> TokenLoss:
    """L = −A · σ(τ(r − 1)) · 4/τ, τ = tau_pos where A > 0, tau_neg elsewhere; no clip.  Gao et al., 2025."""
    advantages_BT = tokens.advantages_BT
    tau_BT = torch.full_like(advantages_BT, settings.tau_neg).masked_fill(advantages_BT > 0, settings.tau_pos)
    loss_BT = -advantages_BT * torch.sigmoid(tau_BT * (_ratio(tokens) - 1)) * (4 / tau_BT)
    return TokenLoss(loss_BT, torch.zeros_like(tau_BT), torch.zeros_like(tau_BT))


def reinforce(tokens: Tokens, settings: LossSettings) -> TokenLoss:
    """L = −A · log π.  Williams, 1992; rollout weights correct for the policy that sampled the tokens."""
    zeros_BT = torch.zeros_like(tokens.advantages_BT)
    return TokenLoss(-tokens.advantages_BT * tokens.logprobs_BT, zeros_BT, zeros_BT)


def dppo_tv(tokens: Tokens, settings: LossSettings) -> TokenLoss:
    """L = −A · sg[min(r, c)] · log π · valid;  valid where π − old ≤ ε_high (A > 0), π − old ≥ −ε_low (else).

    This compares probabilities, not ratios (a bound in total variation), so the ratio of a rare token may change a lot.
    `clipped` marks tokens that are not valid, `clipped_lower` valid tokens whose ratio is capped.
    The DPPO paper, arXiv 2602.04879 (verl `dppo_tv`).
    """
    ratio_BT = _ratio(tokens).detach()
    change_BT = tokens.logprobs_BT.exp() - tokens.old_logprobs_BT.exp()
    valid_BT = torch.where(tokens.advantages_BT > 0, change_BT <= settings.clip_high, change_BT >= -settings.clip_low)
    capped_BT = ratio_BT if settings.clip_c is None else ratio_BT.clamp(max=settings.clip_c)
    return TokenLoss(
        -tokens.advantages_BT * capped_BT * tokens.logprobs_BT * valid_BT, ~valid_BT, valid_BT & (ratio_BT > capped_BT)
    )


def _ratio(tokens: Tokens) -> Tensor:
    return clamp_log_ratio(tokens.logprobs_BT - tokens.old_logprobs_BT).exp()


def _clipped(ratio_BT: Tensor, advantages_BT: Tensor, settings: LossSettings) -> TokenLoss:
    unclipped_BT = -advantages_BT * ratio_BT
    clipped_BT = -advantages_BT * ratio_BT.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return TokenLoss(torch.maximum(unclipped_BT, clipped_BT), clipped_BT > unclipped_BT, torch.zeros_like(unclipped_BT))


POLICY_LOSSES: dict[PolicyLossKind, Callable[[Tokens, LossSettings], TokenLoss]] = {
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "reinforce": reinforce,
    "dppo_tv": dppo_tv,
}


class PolicyLoss(NamedTuple):
    """The scalar loss, the loss per token (0 outside the mask), and 1 where the loss is the clipped one."""

    loss: Tensor
    loss_BT: Tensor
    clipped_BT: Tensor
    clipped_lower_BT: Tensor


def policy_loss(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    kind: PolicyLossKind = "ppo",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float | None = 3.0,
    rollout_weights_BT: Tensor | None = None,
    aggregation: Aggregation = "token-mean",
    denominator: float | Tensor | None = None,
    horizon: float | None = None,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> PolicyLoss:
    """Return aggregate(w · L, mask), L by `kind`, w = rollout_weights_BT (1 if None).  [B, T] → scalar and [B, T].

    With r = exp(clamp(log π − log old, ±20)) and A the advantage:
    ppo        max(−A·r, −A·clip(r, 1−clip_low, 1+clip_high)), where A < 0 at most −A·clip_c (None: no dual clip)
    gspo       the same clip, without clip_c, on the sequence's ratio exp(mean_t(log π − log old))
    cispo      −sg[clip(r, 1−clip_low, 1+clip_high)] · A · log π
    sapo       −A · σ(τ(r − 1)) · 4/τ, τ = tau_pos where A > 0, else tau_neg
    reinforce  −A · log π
    dppo_tv    −A · sg[min(r, clip_c)] · log π where the *probability* rose by at most clip_high (A > 0) or fell by at
               most clip_low (A ≤ 0), else 0; clip_c None: no cap
    The papers are named at each kind's function above. Decoupled PPO (Hilton et al., 2022) is ppo with weights
    old / rollout. See `aggregate` for `aggregation`, `denominator` and `horizon`.
    Clip fractions are masked means of clipped_BT and clipped_lower_BT (float, 0 outside the mask).
    Raises ValueError for an unknown kind or aggregation, for mismatched shapes, and for ppo's clip_c ≤ 1.
    """
    check_literal("policy loss", kind, PolicyLossKind)
    check_same_shape(
        logprobs_BT=logprobs_BT, old_logprobs_BT=old_logprobs_BT, advantages_BT=advantages_BT, mask_BT=mask_BT
    )
    tokens = Tokens(
        apply_mask(logprobs_BT, mask_BT),
        apply_mask(old_logprobs_BT.detach(), mask_BT),
        apply_mask(advantages_BT.detach(), mask_BT),
        mask_BT,
    )
    result = POLICY_LOSSES[kind](tokens, LossSettings(clip_low, clip_high, clip_c, tau_pos, tau_neg))
    loss_BT = result.loss_BT
    if rollout_weights_BT is not None:
        check_same_shape(logprobs_BT=logprobs_BT, rollout_weights_BT=rollout_weights_BT)
        loss_BT = loss_BT * apply_mask(rollout_weights_BT.detach(), mask_BT)
    return PolicyLoss(
        aggregate(loss_BT, mask_BT, aggregation, denominator=denominator, horizon=horizon),
        loss_BT,
        result.clipped_BT.to(loss_BT.dtype),
        result.clipped_lower_BT.to(loss_BT.dtype),
    )


class ValueLoss(NamedTuple):
    """The loss, and 1 for every token whose loss is the clipped one."""

    loss: Tensor
    clipped_BT: Tensor


def value_loss(
    values_BT: Tensor,
    old_values_BT: Tensor,
    returns_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip: float | None,
    aggregation: Aggregation = "token-mean",
    denominator: float | Tensor | None = None,
    horizon: float | None = None,
) -> ValueLoss:
    """Return aggregate(½ · max((V − R)², (clamp(V, V_old ± clip) − R)²), mask).  [B, T] → scalar and [B, T].

    `clip` is in units of the rewards; `clip=None` gives ½·(V − R)². See `aggregate` for `aggregation`, `denominator`
    and `horizon`.  Schulman et al., 2017, as in verl and OpenRLHF.
    Raises ValueError for mismatched shapes and for a clip that is not above 0.
    """
    check_same_shape(values_BT=values_BT, old_values_BT=old_values_BT, returns_BT=returns_BT, mask_BT=mask_BT)
    if clip is not None and clip <= 0:
        raise ValueError(f"clip must be above 0, not {clip}: None turns it off")
    values_BT = apply_mask(values_BT, mask_BT)
    old_BT = apply_mask(old_values_BT.detach(), mask_BT)
    returns_BT = apply_mask(returns_BT.detach(), mask_BT)
    unclipped_BT = (values_BT - returns_BT).square()
    clipped_error_BT = unclipped_BT
    if clip is not None:
        # old + clamp(V − old) is not exactly V within the bounds, so rounding would mark tokens as clipped.
        clipped_error_BT = (values_BT.clamp(old_BT - clip, old_BT + clip) - returns_BT).square()
    loss_BT = 0.5 * torch.maximum(unclipped_BT, clipped_error_BT)
    return ValueLoss(
        aggregate(loss_BT, mask_BT, aggregation, denominator=denominator, horizon=horizon),
        (clipped_error_BT > unclipped_BT).to(loss_BT.dtype),
    )
