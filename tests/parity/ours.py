"""Attune's side of the comparisons: each function takes a batch of `draws` and the settings of its case.

A peer's module has functions with the same names and settings that call the peer's code. This module imports no peer,
because the golden test runs it in the main environment.
"""

from typing import Any

import torch
from torch import Tensor

from alignment import functional
from alignment.algorithms.group_relative import overlong_penalty as penalty_of_length
from alignment.config.policy_gradient_algorithms import Aggregation, KLKind
from tests.parity.draws import Tensors

METRICS = (
    "kl",
    "k3_kl",
    "chi2_token",
    "chi2_seq",
    "training_ppl",
    "rollout_ppl",
    "log_ppl_diff",
    "rollout_is_mean",
    "rollout_is_std",
    "rollout_is_max",
    "rollout_is_min",
    "rollout_is_eff_sample_size",
    "rollout_is_ratio_fraction_high",
    "rollout_is_ratio_fraction_low",
)
KL_COEF = 0.07
KLS = (0.02, 1.0, 0.09, 0.0, 0.3, 0.11)  # inputs of an adaptive controller, with the numbers of samples below
STEPS = (256, 256, 64, 1000, 7, 96)
LENGTHS = (0, 1, 59, 60, 61, 70, 79, 80, 81, 500)


def policy_loss(x: Tensors, *, per: str = "token", **settings: Any) -> Tensor:
    return _policy_loss(x, per, settings).loss


def clip_fractions(x: Tensors, **settings: Any) -> Tensor:
    """Return the shares of tokens at the clip and at the lower bound.  [2]"""
    out = _policy_loss(x, "token", settings)
    return torch.stack(
        [
            functional.masked_mean(share.to(x["mask_BT"]), x["mask_BT"])
            for share in (out.clipped_BT, out.clipped_lower_BT)
        ]
    )


def clip_fraction(x: Tensors, **settings: Any) -> Tensor:
    return clip_fractions(x, **settings)[:1]


def policy_loss_of_sums(x: Tensors, **settings: Any) -> Tensor:
    """Return the loss with a reply as one action: RLOO's loss is PPO's on sequences of one token."""
    sums = {name: (x[name] * x["mask_BT"]).sum(-1, keepdim=True) for name in ("logprobs_BT", "old_logprobs_BT")}
    mask_B1 = torch.ones_like(sums["logprobs_BT"])
    return functional.policy_loss(
        sums["logprobs_BT"], sums["old_logprobs_BT"], x["advantages_B"][:, None], mask_B1, **settings
    ).loss


def policy_loss_with_kl(x: Tensors, *, kl_kind: KLKind, **settings: Any) -> Tensor:
    kl_BT = functional.kl_estimate(x["logprobs_BT"], x["ref_logprobs_BT"], kl_kind)
    return policy_loss(x, **settings) + KL_COEF * functional.aggregate(kl_BT, x["mask_BT"], settings["aggregation"])


def corrected_policy_loss(x: Tensors, *, correction: dict[str, Any], **settings: Any) -> Tensor:
    """Decoupled PPO: the ratio to the proximal policy, weighted by proximal / behaviour."""
    correction_result = functional.rollout_correction(
        x["old_logprobs_BT"], x["rollout_logprobs_BT"], x["mask_BT"], **correction
    )
    x = x | {"mask_BT": correction_result.mask_BT}
    return _policy_loss(x, "token", settings | {"rollout_weights_BT": correction_result.weights_BT}).loss


def bypass_loss(x: Tensors, *, correction: dict[str, Any], aggregation: str) -> Tensor:
    """REINFORCE on the engine's samples, weighted by policy / behaviour."""
    correction_result = functional.rollout_correction(
        x["logprobs_BT"].detach(), x["rollout_logprobs_BT"], x["mask_BT"], **correction
    )
    settings = {"kind": "reinforce", "aggregation": aggregation, "rollout_weights_BT": correction_result.weights_BT}
    return _policy_loss(x | {"mask_BT": correction_result.mask_BT}, "token", settings).loss


def aggregate(x: Tensors, *, mode: Aggregation, denominator: float | None = None, horizon: int | None = None) -> Tensor:
    return functional.aggregate(x["returns_BT"], x["mask_BT"], mode, denominator=denominator, horizon=horizon)


def masked_mean(x: Tensors) -> Tensor:
    return functional.masked_mean(x["returns_BT"], x["mask_BT"])


def kl_estimate(x: Tensors, *, kind: KLKind) -> Tensor:
    return functional.kl_estimate(x["logprobs_BT"], x["ref_logprobs_BT"], kind) * x["mask_BT"]


def kl_in_reward(x: Tensors, *, kind: KLKind) -> Tensor:
    kl_BT = functional.kl_estimate(x["old_logprobs_BT"], x["ref_logprobs_BT"], kind)
    return (x["rewards_BT"] - KL_COEF * kl_BT) * x["mask_BT"]


def adaptive_kl(x: Tensors, *, init: float, target: float, horizon: int) -> Tensor:
    """Return the coefficient after each update.  [len(KLS)], float64"""
    controller, values = functional.AdaptiveKLController(init, target, horizon), []
    for kl, n_steps in zip(KLS, STEPS, strict=True):
        controller.update(kl, n_steps)
        values.append(controller.value)
    return torch.tensor(values, dtype=torch.float64)


def gae_whitened(x: Tensors, *, gamma: float, lam: float) -> Tensor:
    """Return whitened advantages, and returns.  [2, B, T]"""
    advantages_BT, returns_BT = functional.gae_advantage(x["rewards_BT"], x["values_BT"], x["mask_BT"], gamma, lam)
    return torch.stack([functional.whiten(advantages_BT, x["mask_BT"]), returns_BT]) * x["mask_BT"]


def gae(x: Tensors, *, gamma: float, lam: float) -> Tensor:
    """Return advantages, and returns.  [2, B, T]"""
    return (
        torch.stack(functional.gae_advantage(x["rewards_BT"], x["values_BT"], x["mask_BT"], gamma, lam)) * x["mask_BT"]
    )


def group_advantage(x: Tensors, *, groups: str, scale_by_std: bool, eps: float = 1e-6) -> Tensor:
    return functional.group_advantage(x["rewards_B"], x[groups], scale_by_std=scale_by_std, eps=eps)


def leave_one_out_advantage(x: Tensors, *, groups: str) -> Tensor:
    return functional.leave_one_out_advantage(x["rewards_B"], x[groups])


def reinforce_plus_plus(x: Tensors, *, gamma: float) -> Tensor:
    return functional.reinforce_plus_plus_advantage(x["rewards_BT"], x["mask_BT"], gamma=gamma) * x["mask_BT"]


def reinforce_plus_plus_baseline(x: Tensors, *, groups: str) -> Tensor:
    return functional.reinforce_plus_plus_advantage(x["rewards_BT"], x["mask_BT"], group_B=x[groups]) * x["mask_BT"]


def whiten(x: Tensors) -> Tensor:
    return functional.whiten(x["returns_BT"], x["mask_BT"]) * x["mask_BT"]


def rollout_weights(x: Tensors, **settings: Any) -> Tensor:
    correction_result = functional.rollout_correction(
        x["old_logprobs_BT"], x["rollout_logprobs_BT"], x["mask_BT"], **settings
    )
    return correction_result.weights_BT * x["mask_BT"]


def rollout_mask(x: Tensors, **settings: Any) -> Tensor:
    return functional.rollout_correction(
        x["old_logprobs_BT"], x["rollout_logprobs_BT"], x["mask_BT"], **settings
    ).mask_BT


def rollout_metrics(x: Tensors, *, names: tuple[str, ...] = METRICS, **settings: Any) -> Tensor:
    metrics = functional.rollout_correction(
        x["old_logprobs_BT"], x["rollout_logprobs_BT"], x["mask_BT"], **settings
    ).metrics
    return torch.tensor([metrics[f"rollout_corr/{name}"] for name in names], dtype=x["mask_BT"].dtype)


def proximal_loglinear(x: Tensors) -> Tensor:
    return functional.proximal_loglinear(x["logprobs_BT"], x["rollout_logprobs_BT"], x["lag_B"]) * x["mask_BT"]


def value_loss(x: Tensors, **settings: Any) -> Tensor:
    return functional.value_loss(x["values_BT"], x["old_values_BT"], x["returns_BT"], x["mask_BT"], **settings).loss


def value_clip_fraction(x: Tensors, **settings: Any) -> Tensor:
    clipped_BT = functional.value_loss(
        x["values_BT"], x["old_values_BT"], x["returns_BT"], x["mask_BT"], **settings
    ).clipped_BT
    return functional.masked_mean(clipped_BT.to(x["mask_BT"]), x["mask_BT"])


def dpo_loss(x: Tensors, *, by_length: bool = False, **settings: Any) -> Tensor:
    """Return the mean loss and the mean rewards of the chosen and the rejected.  [3]"""
    settings |= {name: x[name] for name in ("chosen_length_P", "rejected_length_P")} if by_length else {}
    out = functional.dpo_loss(x["chosen_P"], x["rejected_P"], x["ref_chosen_P"], x["ref_rejected_P"], **settings)
    return torch.stack([out.loss_P.mean(), out.chosen_rewards_P.mean(), out.rejected_rewards_P.mean()])


def preference_loss(x: Tensors, **settings: Any) -> Tensor:
    return dpo_loss(x, **settings)[0]


def ipo_of_sums(x: Tensors, *, beta: float) -> Tensor:
    """Return IPO on sums of log-probs, which is IPO by length where every reply has one token.  [3]"""
    one_P = torch.ones_like(x["chosen_length_P"])
    return dpo_loss(x | {"chosen_length_P": one_P, "rejected_length_P": one_P}, beta=beta, kind="ipo", by_length=True)


def kto_loss(x: Tensors, *, only: str = "", kl_below_zero: bool = False, **settings: Any) -> Tensor:
    kl = (x["mismatched_B"] - x["ref_mismatched_B"]).mean() * (-1 if kl_below_zero else 1)
    out = functional.kto_loss(x["logps_B"], x["ref_logps_B"], desirable(x, only), kl=float(kl), **settings)
    return out.loss_B.mean()


def bradley_terry_loss(x: Tensors) -> Tensor:
    return functional.bradley_terry_loss(x["chosen_P"], x["rejected_P"]).mean()


def overlong_penalty(x: Tensors, *, longest: int, buffer: int) -> Tensor:
    return torch.tensor([penalty_of_length(length, longest, buffer) for length in LENGTHS], dtype=torch.float64)


def desirable(x: Tensors, only: str) -> Tensor:
    """Return the labels of a batch, or with `only` the labels of a batch of one class."""
    return x["desirable_B"] if not only else torch.full_like(x["desirable_B"], only == "desirable")


def advantages(x: Tensors, per: str) -> Tensor:
    """Return advantages per token, or one per sequence, expanded to its tokens."""
    return x["advantages_BT"] if per == "token" else x["advantages_B"][:, None].expand_as(x["mask_BT"])


def _policy_loss(x: Tensors, per: str, settings: dict[str, Any]) -> functional.PolicyLoss:
    return functional.policy_loss(x["logprobs_BT"], x["old_logprobs_BT"], advantages(x, per), x["mask_BT"], **settings)
