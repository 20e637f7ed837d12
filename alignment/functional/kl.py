"""How far the policy is from its reference, and how dear that should be."""

import math

import torch
from torch import Tensor

from alignment.config.algorithm import KLKind
from alignment.functional.arguments import known, same_shape
from alignment.functional.ratio import bounded

MAX_K3 = 10.0


def kl_estimate(logprobs_BT: Tensor, reference_BT: Tensor, kind: KLKind) -> Tensor:
    """KL(π ‖ reference) per token in nats, from samples of π.  [B, T] → [B, T].  Schulman, 2020.

    With d = log π − log ref:
    k1   d                          unbiased; its gradient has mean 0 and teaches nothing
    k2   ½·d²                       biased value, right gradient
    k3   e^−d + d − 1               unbiased and ≥ 0; d is kept within ±20, the result within ±10 (as verl)
    abs  |d|
    k1+, k2+, k3+, abs+ are straight-through: the value of the kind with the gradient of k2.
    Where d is not finite (padding may hold anything) the value follows the formula and the gradient is 0.
    Raises ValueError for an unknown kind, and for shapes that do not match.
    """
    known("KL estimate", kind, KLKind)
    same_shape(logprobs_BT=logprobs_BT, reference_BT=reference_BT)
    raw_BT = logprobs_BT - reference_BT
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
    towards_BT = bounded(-difference_BT)
    return (towards_BT.exp() - towards_BT - 1).clamp(-MAX_K3, MAX_K3)


class AdaptiveKLController:
    """A coefficient that goes up while the KL is above its target, and down while below.

    e = clip(kl/target − 1, ±0.2);  value ← value · (1 + e · n_steps/horizon).  Ziegler et al., 2019.
    `target` in nats, `horizon` and `n_steps` in samples.  Raises ValueError for a target or horizon that is not above
    0, and for a KL that is not finite, which would spoil the coefficient for good.

    Example: 0.001 with target 0.1 and horizon 10000 is 0.00099488 after kl = 0.02 over 256 samples.
    """

    def __init__(self, init: float, target: float, horizon: float) -> None:
        if target <= 0 or horizon <= 0:
            raise ValueError(f"target and horizon must be above 0, not {target} and {horizon}")
        self.value = init
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, n_steps: int) -> None:
        if not math.isfinite(kl):
            raise ValueError(f"a KL of {kl} cannot steer the coefficient")
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon
