"""KL divergence: between distributions, per-token estimates to the reference, and the adaptive coefficient."""

import math

import torch
from torch import Tensor

from alignment.config.policy_gradient_algorithms import KLKind
from alignment.functional.aggregation import check_literal, check_same_shape
from alignment.functional.importance import clamp_log_ratio

MAX_K3 = 10.0


def kl_estimate(logprobs_BT: Tensor, ref_logprobs_BT: Tensor, kind: KLKind) -> Tensor:
    """Estimate KL(π ‖ reference) per token in nats, from samples of π.  [B, T] → [B, T].  Schulman, 2020.

    With d = log π − log ref:
    k1   d                          unbiased; its gradient has mean 0, so it must not be used as a loss
    k2   ½·d²                       biased value, correct gradient
    k3   e^−d + d − 1               unbiased and ≥ 0; d is clamped to ±20, the result to ±10 (as verl)
    abs  |d|
    k1+, k2+, k3+, abs+ are straight-through: the value of that kind with the gradient of k2.
    Where d is not finite (padding may hold any number) the value follows the formula and the gradient is 0.
    Raises ValueError for an unknown kind and for mismatched shapes.
    """
    check_literal("KL estimate", kind, KLKind)
    check_same_shape(logprobs_BT=logprobs_BT, ref_logprobs_BT=ref_logprobs_BT)
    raw_BT = logprobs_BT - ref_logprobs_BT
    finite_BT = raw_BT.isfinite()
    difference_BT = torch.where(finite_BT, raw_BT, torch.zeros_like(raw_BT))
    name = kind.removesuffix("+")
    value_BT = _value(difference_BT, name)
    if kind.endswith("+"):
        k2_BT = _value(difference_BT, "k2")
        value_BT = k2_BT - k2_BT.detach() + value_BT.detach()
    return torch.where(finite_BT, value_BT, _value(raw_BT.detach(), name))


def _value(difference_BT: Tensor, name: str) -> Tensor:
    if name == "k1":
        return difference_BT
    if name == "k2":
        return 0.5 * difference_BT.square()
    if name == "abs":
        return difference_BT.abs()
    inverse_BT = clamp_log_ratio(-difference_BT)
    return (inverse_BT.exp() - inverse_BT - 1).clamp(-MAX_K3, MAX_K3)


def distribution_kl(old_logprobs_NK: Tensor, new_logprobs_NK: Tensor) -> Tensor:
    """Return KL(old ‖ new) at each of N places, in nats, from the log-probs of the same K tokens.  → [N]

    The tokens of the vocabulary that are not among the K count as one. With the likeliest tokens of the old
    distribution that is a lower bound which is close to the KL, and equal to it where K is the whole vocabulary
    (Cover & Thomas, 2006, section 2.7: the log sum inequality).

    Summed are p · (log p − log q) − p + q, none of which is below 0: their sum is the same, and rounding does not
    outweigh a small KL. Raises ValueError for mismatched shapes.
    """
    check_same_shape(old_logprobs_NK=old_logprobs_NK, new_logprobs_NK=new_logprobs_NK)
    old, new = (_with_rest(logprobs_NK) for logprobs_NK in (old_logprobs_NK, new_logprobs_NK))
    old_probs, new_probs = old.exp(), new.exp()
    return (old_probs * (old - new) - old_probs + new_probs).sum(-1)


def _with_rest(logprobs_NK: Tensor) -> Tensor:
    """Add the log-prob of all other tokens, at least that of the rounding error of a sum.  → [N, K + 1]"""
    rest_N1 = (1 - logprobs_NK.exp().sum(-1, keepdim=True)).clamp(min=torch.finfo(logprobs_NK.dtype).eps)
    return torch.cat((logprobs_NK, rest_N1.log()), dim=-1)


class AdaptiveKLController:
    """A coefficient that rises while the KL is above its target and falls while it is below.

    e = clip(kl/target − 1, ±0.2);  value ← value · (1 + e · n_steps/horizon).  Ziegler et al., 2019.
    `target` in nats, `horizon` and `n_steps` in samples.  Raises ValueError for a target or horizon that is not above
    0, and for a KL that is not finite: it would make the coefficient NaN for good.

    Example: with target 0.1 and horizon 10000, 0.001 becomes 0.00099488 after kl = 0.02 over 256 samples.
    """

    def __init__(self, init: float, target: float, horizon: float) -> None:
        if target <= 0 or horizon <= 0:
            raise ValueError(f"target and horizon must be above 0, not {target} and {horizon}")
        self.value = init
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, n_steps: int) -> None:
        if not math.isfinite(kl):
            raise ValueError(f"the KL must be finite, got {kl}")
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon
