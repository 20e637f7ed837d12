"""KL divergence to the reference: per-token estimates, and the adaptive coefficient."""

import math

import torch
from torch import Tensor

from alignment.config.algorithm import KLKind
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
