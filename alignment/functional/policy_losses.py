"""The built-in policy losses, the loss per token of every kind, weighted and aggregated, and the loss of the critic.

Notation: π the policy, `old` the proximal policy, r = exp(clamp(log π − log old, ±20)), A the advantage, sg[·]
stop-gradient, ε_low, ε_high and c the settings `clip_low`, `clip_high` and `clip_c`.
"""

from typing import NamedTuple

import torch
from pydantic import BaseModel
from torch import Tensor

from alignment.config.policy_gradient_algorithms import Aggregation, PolicyLossKind
from alignment.functional.aggregation import aggregate, apply_mask, check_literal, check_same_shape
from alignment.functional.policy_loss_registry import (
    POLICY_LOSSES,
    TokenLoss,
    TokenLossInputs,
    register_policy_loss,
    weighted_token_loss,
)

MAX_LOG_SEQUENCE_RATIO = 10.0  # verl's bound for GSPO's mean log-ratio
CLIPPED, CLIPPED_LOWER = "actor/pg_clipfrac", "actor/pg_clipfrac_lower"  # 1 where the loss is the clipped one


class ClipParams(BaseModel):
    clip_low: float
    clip_high: float


class CappedClipParams(ClipParams):
    clip_c: float | None  # the dual clip, or the ratio's cap


class SAPOParams(BaseModel):
    tau_pos: float
    tau_neg: float


@register_policy_loss("ppo", CappedClipParams)
def ppo(inputs: TokenLossInputs, params: CappedClipParams) -> TokenLoss:
    """L = max(−A·r, −A·clip(r, 1−ε_low, 1+ε_high));  where A < 0: L = min(L, −A·c).

    Schulman et al., 2017; Ye et al., 2020 (dual clip, c > 1); Yu et al., 2025 (DAPO: ε_high > ε_low).
    """
    clip_c, advantages_BT = params.clip_c, inputs.advantages_BT
    if clip_c is not None and clip_c <= 1:
        raise ValueError(f"clip_c bounds the ratio where the advantage is negative and must be above 1, not {clip_c}")
    upper_BT, clipped_BT = _clip(inputs.ratio_BT, advantages_BT, params)
    if clip_c is None:
        return _token_loss(upper_BT, clipped_BT)
    lower_BT = -advantages_BT * clip_c
    negative_BT = advantages_BT < 0
    loss_BT = torch.where(negative_BT, torch.minimum(upper_BT, lower_BT), upper_BT)
    return _token_loss(loss_BT, clipped_BT, negative_BT & (upper_BT > lower_BT))


@register_policy_loss("gspo", ClipParams)
def gspo(inputs: TokenLossInputs, params: ClipParams) -> TokenLoss:
    """PPO's clip on the sequence's ratio s_i = exp(mean_t(log π − log old)). Each of its tokens has the ratio
    exp(sg[log s_i] + log π − sg[log π]); log s_i is at most 10. No dual clip. Zheng et al., 2025.
    """
    logprobs_BT, mask_BT = inputs.logprobs_BT, inputs.response_mask_BT
    log_ratio_B = (logprobs_BT - inputs.old_logprobs_BT).detach().sum(-1) / mask_BT.sum(-1).clamp(min=1)
    log_ratio_BT = log_ratio_B[:, None] + logprobs_BT - logprobs_BT.detach()
    ratio_BT = log_ratio_BT.clamp(max=MAX_LOG_SEQUENCE_RATIO).exp()
    return _token_loss(*_clip(ratio_BT, inputs.advantages_BT, params))


@register_policy_loss("cispo", ClipParams)
def cispo(inputs: TokenLossInputs, params: ClipParams) -> TokenLoss:
    """L = −sg[clip(r, 1−ε_low, 1+ε_high)] · A · log π: clipped tokens keep a gradient.  MiniMax, 2025 (M1)."""
    ratio_BT = inputs.ratio_BT.detach()
    clipped_BT = ratio_BT.clamp(1 - params.clip_low, 1 + params.clip_high)
    return _token_loss(-clipped_BT * inputs.advantages_BT * inputs.logprobs_BT, ratio_BT != clipped_BT)


@register_policy_loss("sapo", SAPOParams)
def sapo(inputs: TokenLossInputs, params: SAPOParams) -> TokenLoss:
    """L = −A · σ(τ(r − 1)) · 4/τ, τ = tau_pos where A > 0, tau_neg elsewhere; no clip.  Gao et al., 2025."""
    advantages_BT = inputs.advantages_BT
    tau_BT = torch.full_like(advantages_BT, params.tau_neg).masked_fill(advantages_BT > 0, params.tau_pos)
    return _token_loss(-advantages_BT * torch.sigmoid(tau_BT * (inputs.ratio_BT - 1)) * (4 / tau_BT))


@register_policy_loss("reinforce")
def reinforce(inputs: TokenLossInputs) -> TokenLoss:
    """L = −A · log π.  Williams, 1992; rollout weights correct for the policy that sampled the tokens."""
    return _token_loss(-inputs.advantages_BT * inputs.logprobs_BT)


@register_policy_loss("dppo_tv", CappedClipParams)
def dppo_tv(inputs: TokenLossInputs, params: CappedClipParams) -> TokenLoss:
    """L = −A · sg[min(r, c)] · log π · valid;  valid where π − old ≤ ε_high (A > 0), π − old ≥ −ε_low (else).

    This compares probabilities, not ratios (a bound in total variation), so the ratio of a rare token may change a lot.
    `pg_clipfrac` counts tokens that are not valid, `pg_clipfrac_lower` valid tokens whose ratio is capped.
    The DPPO paper, arXiv 2602.04879 (verl `dppo_tv`).
    """
    advantages_BT, ratio_BT = inputs.advantages_BT, inputs.ratio_BT.detach()
    change_BT = inputs.logprobs_BT.exp() - inputs.old_logprobs_BT.exp()
    valid_BT = torch.where(advantages_BT > 0, change_BT <= params.clip_high, change_BT >= -params.clip_low)
    capped_BT = ratio_BT if params.clip_c is None else ratio_BT.clamp(max=params.clip_c)
    loss_BT = -advantages_BT * capped_BT * inputs.logprobs_BT * valid_BT
    return _token_loss(loss_BT, ~valid_BT, valid_BT & (ratio_BT > capped_BT))


def _clip(ratio_BT: Tensor, advantages_BT: Tensor, params: ClipParams) -> tuple[Tensor, Tensor]:
    """Return the clipped loss per token, and 1 where it is not the loss without the clip."""
    unclipped_BT = -advantages_BT * ratio_BT
    clipped_BT = -advantages_BT * ratio_BT.clamp(1 - params.clip_low, 1 + params.clip_high)
    return torch.maximum(unclipped_BT, clipped_BT), clipped_BT > unclipped_BT


def _token_loss(loss_BT: Tensor, clipped_BT: Tensor | None = None, lower_BT: Tensor | None = None) -> TokenLoss:
    """Return the loss with both clip fractions as metrics; None stands for zeros."""
    zeros_BT = torch.zeros_like(loss_BT, requires_grad=False)
    clipped_BT, lower_BT = (zeros_BT if x_BT is None else x_BT.to(loss_BT.dtype) for x_BT in (clipped_BT, lower_BT))
    return TokenLoss(loss_BT, {CLIPPED: clipped_BT, CLIPPED_LOWER: lower_BT})


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
    settings = {"clip_low": clip_low, "clip_high": clip_high, "clip_c": clip_c, "tau_pos": tau_pos, "tau_neg": tau_neg}
    inputs = TokenLossInputs(logprobs_BT, old_logprobs_BT, old_logprobs_BT, advantages_BT, mask_BT)
    result = weighted_token_loss(POLICY_LOSSES[kind].bind(settings), inputs, rollout_weights_BT)
    return PolicyLoss(
        aggregate(result.loss_BT, mask_BT, aggregation, denominator=denominator, horizon=horizon),
        result.loss_BT,
        *(torch.as_tensor(result.metrics[name]) for name in (CLIPPED, CLIPPED_LOWER)),
    )


class ValueLoss(NamedTuple):
    """The loss, and 1 for every token whose loss is the clipped one."""

    loss: Tensor
    clipped_BT: Tensor


class TokenValueLoss(NamedTuple):
    """The loss per token, 0 outside the mask, and 1 for every token whose loss is the clipped one."""

    loss_BT: Tensor
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
    """Return aggregate(`value_loss_per_token`, mask).  [B, T] → scalar and [B, T].

    See `aggregate` for `aggregation`, `denominator` and `horizon`.
    """
    loss_BT, clipped_BT = value_loss_per_token(values_BT, old_values_BT, returns_BT, mask_BT, clip=clip)
    return ValueLoss(aggregate(loss_BT, mask_BT, aggregation, denominator=denominator, horizon=horizon), clipped_BT)


def value_loss_per_token(
    values_BT: Tensor, old_values_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor, *, clip: float | None
) -> TokenValueLoss:
    """Return ½ · max((V − R)², (clamp(V, V_old ± clip) − R)²).  [B, T] → [B, T] each.

    `clip` is in units of the rewards; `clip=None` gives ½·(V − R)².  Schulman et al., 2017, as in verl and OpenRLHF.
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
    return TokenValueLoss(loss_BT, (clipped_error_BT > unclipped_BT).to(loss_BT.dtype))
