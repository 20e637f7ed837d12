"""What a token's loss is, by kind: the functions that `policy_loss` chooses from.

Each takes tokens whose padding has been zeroed and gives loss, clipped and clipped_lower, [B, T] each.
Notation: π the policy, `old` the policy that drew or stands for it, r = exp(clamp(log π − log old, ±20)), A the
advantage, sg[·] stop-gradient, ε_low and ε_high `clip_low` and `clip_high`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from alignment.config.algorithm import PolicyLossKind
from alignment.functional.ratio import bounded

MAX_LOG_SEQUENCE_RATIO = 10.0  # verl's bound for GSPO's mean log-ratio


class Tokens(NamedTuple):
    """[B, T] each; `logprobs_BT` carries the gradient, the others are constants."""

    logprobs_BT: Tensor
    old_BT: Tensor
    advantages_BT: Tensor
    mask_BT: Tensor


class Bounds(NamedTuple):
    """How far a policy may go from the old one, in each kind's own terms."""

    low: float
    high: float
    c: float | None
    tau_pos: float
    tau_neg: float


class Surrogate(NamedTuple):
    """A loss per token, and 1 where a bound was what decided it."""

    loss_BT: Tensor
    clipped_BT: Tensor
    clipped_lower_BT: Tensor


def ppo(tokens: Tokens, bounds: Bounds) -> Surrogate:
    """L = max(−A·r, −A·clip(r, 1−ε_low, 1+ε_high));  where A < 0: L = min(L, −A·c).

    Schulman et al., 2017; Ye et al., 2020 (dual clip, c > 1); Yu et al., 2025 (DAPO: ε_high > ε_low).
    """
    if bounds.c is not None and bounds.c <= 1:
        raise ValueError(f"clip_c bounds the ratio where the advantage is negative and must be above 1, not {bounds.c}")
    advantages_BT = tokens.advantages_BT
    upper = _clipped(_ratio(tokens), advantages_BT, bounds)
    if bounds.c is None:
        return upper
    lower_BT = -advantages_BT * bounds.c
    negative_BT = advantages_BT < 0
    loss_BT = torch.where(negative_BT, torch.minimum(upper.loss_BT, lower_BT), upper.loss_BT)
    return Surrogate(loss_BT, upper.clipped_BT, negative_BT & (upper.loss_BT > lower_BT))


def gspo(tokens: Tokens, bounds: Bounds) -> Surrogate:
    """PPO's clip on the sequence's ratio s_i = exp(mean_t(log π − log old)), which every token of it carries as
    exp(sg[log s_i] + log π − sg[log π]); log s_i is at most 10.  No dual clip.  Zheng et al., 2025.
    """
    logprobs_BT = tokens.logprobs_BT
    log_ratio_B = (logprobs_BT - tokens.old_BT).detach().sum(-1) / tokens.mask_BT.sum(-1).clamp(min=1)
    log_ratio_BT = log_ratio_B[:, None] + logprobs_BT - logprobs_BT.detach()
    return _clipped(log_ratio_BT.clamp(max=MAX_LOG_SEQUENCE_RATIO).exp(), tokens.advantages_BT, bounds)


def cispo(tokens: Tokens, bounds: Bounds) -> Surrogate:
    """L = −sg[clip(r, 1−ε_low, 1+ε_high)] · A · log π: clipped tokens keep a gradient.  MiniMax, 2025 (M1)."""
    ratio_BT = _ratio(tokens).detach()
    clipped_BT = ratio_BT.clamp(1 - bounds.low, 1 + bounds.high)
    return Surrogate(
        -clipped_BT * tokens.advantages_BT * tokens.logprobs_BT, ratio_BT != clipped_BT, torch.zeros_like(ratio_BT)
    )


def sapo(tokens: Tokens, bounds: Bounds) -> Surrogate:
    """L = −A · σ(τ(r − 1)) · 4/τ, τ = tau_pos where A > 0, tau_neg elsewhere: a gate, no clip.  Gao et al., 2025."""
    advantages_BT = tokens.advantages_BT
    tau_BT = torch.full_like(advantages_BT, bounds.tau_neg).masked_fill(advantages_BT > 0, bounds.tau_pos)
    loss_BT = -advantages_BT * torch.sigmoid(tau_BT * (_ratio(tokens) - 1)) * (4 / tau_BT)
    return Surrogate(loss_BT, torch.zeros_like(tau_BT), torch.zeros_like(tau_BT))


def reinforce(tokens: Tokens, bounds: Bounds) -> Surrogate:
    """L = −A · log π.  Williams, 1992; with rollout weights it is corrected for who drew the tokens."""
    nowhere_BT = torch.zeros_like(tokens.advantages_BT)
    return Surrogate(-tokens.advantages_BT * tokens.logprobs_BT, nowhere_BT, nowhere_BT)


def dppo_tv(tokens: Tokens, bounds: Bounds) -> Surrogate:
    """L = −A · sg[min(r, c)] · log π · valid;  valid where π − old ≤ ε_high (A > 0), π − old ≥ −ε_low (else).

    Probabilities, not ratios, are compared: bounds in total variation, so that a rare token may move far in ratio.
    `clipped` marks tokens that are not valid, `clipped_lower` valid ones whose ratio met the cap.
    The DPPO paper, arXiv 2602.04879 (verl `dppo_tv`).
    """
    ratio_BT = _ratio(tokens).detach()
    moved_BT = tokens.logprobs_BT.exp() - tokens.old_BT.exp()
    valid_BT = torch.where(tokens.advantages_BT > 0, moved_BT <= bounds.high, moved_BT >= -bounds.low)
    capped_BT = ratio_BT if bounds.c is None else ratio_BT.clamp(max=bounds.c)
    return Surrogate(
        -tokens.advantages_BT * capped_BT * tokens.logprobs_BT * valid_BT, ~valid_BT, valid_BT & (ratio_BT > capped_BT)
    )


def _ratio(tokens: Tokens) -> Tensor:
    return bounded(tokens.logprobs_BT - tokens.old_BT).exp()


def _clipped(ratio_BT: Tensor, advantages_BT: Tensor, bounds: Bounds) -> Surrogate:
    free_BT = -advantages_BT * ratio_BT
    bounded_BT = -advantages_BT * ratio_BT.clamp(1 - bounds.low, 1 + bounds.high)
    return Surrogate(torch.maximum(free_BT, bounded_BT), bounded_BT > free_BT, torch.zeros_like(free_BT))


SURROGATES: dict[PolicyLossKind, Callable[[Tokens, Bounds], Surrogate]] = {
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "reinforce": reinforce,
    "dppo_tv": dppo_tv,
}
