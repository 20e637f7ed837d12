"""The policy's loss, of any kind, weighted and aggregated."""

from typing import NamedTuple

from torch import Tensor

from alignment.config.algorithm import Aggregation, PolicyLossKind
from alignment.functional.aggregation import aggregate
from alignment.functional.arguments import known, same_shape
from alignment.functional.masks import inside
from alignment.functional.surrogates import SURROGATES, Bounds, Tokens


class PolicyLoss(NamedTuple):
    """The loss to go backward from, the loss per token (0 outside the mask), and 1 where a bound decided it."""

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
    """aggregate(w · L, mask), L by `kind`, w = rollout_weights_BT (1 if None).  [B, T] → scalar and [B, T].

    With r = exp(clamp(log π − log old, ±20)) and A the advantage:
    ppo        max(−A·r, −A·clip(r, 1−clip_low, 1+clip_high)), where A < 0 at most −A·clip_c (None: no dual clip)
    gspo       the same clip, without clip_c, on the sequence's ratio exp(mean_t(log π − log old))
    cispo      −sg[clip(r, 1−clip_low, 1+clip_high)] · A · log π
    sapo       −A · σ(τ(r − 1)) · 4/τ, τ = tau_pos where A > 0, else tau_neg
    reinforce  −A · log π
    dppo_tv    −A · sg[min(r, clip_c)] · log π where the *probability* rose by at most clip_high (A > 0) or fell by at
               most clip_low (A ≤ 0), else 0; clip_c None: no cap
    Sources stand with each kind in `alignment.functional.surrogates`; decoupled PPO, Hilton et al., 2022, is ppo with
    weights old / rollout. `aggregation`, `denominator` and `horizon` are those of `aggregate`.
    Clip fractions are masked means of clipped_BT and clipped_lower_BT (float, 0 outside the mask).
    Raises ValueError for an unknown kind or aggregation, for shapes that do not match, and for ppo's clip_c ≤ 1.
    """
    known("policy loss", kind, PolicyLossKind)
    same_shape(logprobs_BT=logprobs_BT, old_logprobs_BT=old_logprobs_BT, advantages_BT=advantages_BT, mask_BT=mask_BT)
    tokens = Tokens(
        inside(logprobs_BT, mask_BT),
        inside(old_logprobs_BT.detach(), mask_BT),
        inside(advantages_BT.detach(), mask_BT),
        mask_BT,
    )
    surrogate = SURROGATES[kind](tokens, Bounds(clip_low, clip_high, clip_c, tau_pos, tau_neg))
    loss_BT = surrogate.loss_BT
    if rollout_weights_BT is not None:
        same_shape(logprobs_BT=logprobs_BT, rollout_weights_BT=rollout_weights_BT)
        loss_BT = loss_BT * inside(rollout_weights_BT.detach(), mask_BT)
    return PolicyLoss(
        aggregate(loss_BT, mask_BT, aggregation, denominator=denominator, horizon=horizon),
        loss_BT,
        surrogate.clipped_BT.to(loss_BT.dtype),
        surrogate.clipped_lower_BT.to(loss_BT.dtype),
    )
