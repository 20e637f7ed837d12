"""Rewards → advantages. All results are constants: no gradient goes through them."""

from typing import NamedTuple

import torch
from torch import Tensor

from alignment.errors import SingletonGroup
from alignment.functional.arguments import same_shape
from alignment.functional.masks import inside, whiten


class Gae(NamedTuple):
    """Advantages for the policy, and the returns that the values should have been."""

    advantages_BT: Tensor
    returns_BT: Tensor


class Grouped(NamedTuple):
    """Rewards minus their group's mean, with the group's sum of squares and size spread over its members."""

    centred_B: Tensor
    squares_B: Tensor
    count_B: Tensor


@torch.no_grad()
def gae_advantage(rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, gamma: float, lam: float) -> Gae:
    """Generalised advantage estimation, token by token from the end.  [B, T] → [B, T] each; 0 outside the mask.

    δ_t = r_t + γ·V_{t+1} − V_t;  A_t = δ_t + γλ·A_{t+1};  returns = A + V.  `t+1` is the next token *inside* the
    mask: what lies between (words of a tool or a user) is skipped, without a discount and without its reward.
    Not whitened.  Schulman et al., 2016 (verl `compute_gae_advantage_return`).
    """
    same_shape(rewards_BT=rewards_BT, values_BT=values_BT, mask_BT=mask_BT)
    present_BT = mask_BT.bool()
    next_value_B = advantage_B = values_BT.new_zeros(len(values_BT))
    advantages_BT = torch.zeros_like(values_BT)
    for t in reversed(range(values_BT.shape[1])):
        delta_B = rewards_BT[:, t] + gamma * next_value_B - values_BT[:, t]
        advantage_B = torch.where(present_BT[:, t], delta_B + gamma * lam * advantage_B, advantage_B)
        next_value_B = torch.where(present_BT[:, t], values_BT[:, t], next_value_B)
        advantages_BT[:, t] = advantage_B
    return Gae(inside(advantages_BT, mask_BT), inside(advantages_BT + values_BT, mask_BT))


@torch.no_grad()
def group_advantage(rewards_B: Tensor, group_B: Tensor, *, scale_by_std: bool = True, eps: float = 1e-6) -> Tensor:
    """(R − mean of its group) / (std of its group + eps), std with Bessel's correction.  [B] → [B].

    `group_B` holds integer labels. `scale_by_std=False` leaves R − mean, which is Dr.GRPO.
    Shao et al., 2024 (GRPO); Liu et al., 2025 (Dr.GRPO).
    Raises SingletonGroup, naming the group, where a reply is alone in its group.
    """
    group = _grouped(rewards_B, group_B)
    if not scale_by_std:
        return group.centred_B
    return group.centred_B / ((group.squares_B / (group.count_B - 1)).sqrt() + eps)


@torch.no_grad()
def leave_one_out_advantage(rewards_B: Tensor, group_B: Tensor) -> Tensor:
    """R_i − mean of the others' rewards = n/(n−1) · (R_i − mean of its group).  [B] → [B].

    Ahmadian et al., 2024 (RLOO).  Raises SingletonGroup, naming the group, where there are no others.
    """
    group = _grouped(rewards_B, group_B)
    return group.centred_B * group.count_B / (group.count_B - 1)


@torch.no_grad()
def reinforce_plus_plus_advantage(
    rewards_BT: Tensor, mask_BT: Tensor, *, gamma: float = 1.0, group_B: Tensor | None = None
) -> Tensor:
    """Returns whitened over all tokens of the batch.  [B, T] → [B, T]; 0 outside the mask.

    Without groups: G_t = r_t + γ·G_{t+1} over the tokens inside the mask, then `whiten`.
    With `group_B` [B]: a sequence's rewards are summed, the group's mean subtracted, the difference given to every
    token, then `whiten`.  Hu et al., 2025 (REINFORCE++ and REINFORCE++-baseline).
    Raises SingletonGroup as `group_advantage` does, ValueError for a gamma beside groups (sums have no discount).
    """
    same_shape(rewards_BT=rewards_BT, mask_BT=mask_BT)
    if group_B is not None:
        if gamma != 1.0:
            raise ValueError(f"with groups rewards are summed, without a discount: gamma must be 1, not {gamma}")
        centred_B = _grouped(inside(rewards_BT, mask_BT).sum(-1), group_B).centred_B
        return whiten(centred_B[:, None].expand_as(rewards_BT), mask_BT)
    returns_BT = torch.zeros_like(rewards_BT)
    return_B = rewards_BT.new_zeros(len(rewards_BT))
    for t in reversed(range(rewards_BT.shape[1])):
        return_B = torch.where(mask_BT[:, t].bool(), rewards_BT[:, t] + gamma * return_B, return_B)
        returns_BT[:, t] = return_B
    return whiten(returns_BT, mask_BT)


@torch.no_grad()
def running_baseline(rewards_B: Tensor, baseline: float, decay: float) -> tuple[Tensor, float]:
    """A = R − b, and only then b ← d·b + (1−d)·mean(R): a reward never weighs on its own baseline.

    [B] → [B].  Liu et al., 2025 (SPIRAL, role-conditioned advantage estimation).
    """
    return rewards_B - baseline, decay * baseline + (1 - decay) * float(rewards_B.mean())


def _grouped(rewards_B: Tensor, group_B: Tensor) -> Grouped:
    same_shape(rewards_B=rewards_B, group_B=group_B)
    labels_G, slot_B, count_G = torch.unique(group_B, return_inverse=True, return_counts=True)
    alone = labels_G[count_G == 1].tolist()
    if alone:
        raise SingletonGroup(f"group {alone[0]} has one reply only, and nothing to compare it with")

    def summed(x_B: Tensor) -> Tensor:
        return torch.zeros_like(count_G, dtype=x_B.dtype).index_add(0, slot_B, x_B)[slot_B]

    count_B = count_G[slot_B].to(rewards_B.dtype)
    # From the group's least reward on, because then equal rewards are exactly 0 after centring, and stay 0 over eps.
    least_G = torch.full_like(count_G, torch.inf, dtype=rewards_B.dtype).scatter_reduce(0, slot_B, rewards_B, "amin")
    above_B = rewards_B - least_G[slot_B]
    centred_B = above_B - summed(above_B) / count_B
    return Grouped(centred_B, summed(centred_B.square()), count_B)
