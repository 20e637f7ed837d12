"""Advantages from rewards. All results are constants: no gradient goes through them."""

from typing import NamedTuple

import torch
from torch import Tensor

from alignment.errors import AlignmentError, SingletonGroup
from alignment.functional.aggregation import apply_mask, check_same_shape, whiten
from alignment.tolerance import TOLERANCE


class Gae(NamedTuple):
    """Advantages for the policy, and returns as targets for the critic."""

    advantages_BT: Tensor
    returns_BT: Tensor


class TurnGae(NamedTuple):
    """Advantages of turns for the policy, and returns as targets for the critic."""

    advantages_B: Tensor
    returns_B: Tensor


class CentredRewards(NamedTuple):
    """Rewards minus their group's mean; the sum of squares and the size of the group, repeated for each member.

    Mean, squares and size are those of the group's attempts, of which each shares its weight among its turns.
    `attempt_B` is the mean of each attempt, centred and repeated likewise.
    """

    centred_B: Tensor
    attempt_B: Tensor
    squares_B: Tensor
    count_B: Tensor


@torch.no_grad()
def gae_advantage(rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, gamma: float, lam: float) -> Gae:
    """Return generalised advantage estimates and returns.  [B, T] → [B, T] each; 0 outside the mask.

    δ_t = r_t + γ·V_{t+1} − V_t;  A_t = δ_t + γλ·A_{t+1};  returns = A + V.  `t+1` is the next token *inside* the
    mask: tokens in between (of a tool or a user) are skipped, without a discount and without their reward.
    Not whitened.  Schulman et al., 2016 (verl `compute_gae_advantage_return`).
    """
    check_same_shape(rewards_BT=rewards_BT, values_BT=values_BT, mask_BT=mask_BT)
    present_BT = mask_BT.bool()
    next_value_B = advantage_B = values_BT.new_zeros(len(values_BT))
    advantages_BT = torch.zeros_like(values_BT)
    for t in reversed(range(values_BT.shape[1])):
        delta_B = rewards_BT[:, t] + gamma * next_value_B - values_BT[:, t]
        advantage_B = torch.where(present_BT[:, t], delta_B + gamma * lam * advantage_B, advantage_B)
        next_value_B = torch.where(present_BT[:, t], values_BT[:, t], next_value_B)
        advantages_BT[:, t] = advantage_B
    return Gae(apply_mask(advantages_BT, mask_BT), apply_mask(advantages_BT + values_BT, mask_BT))


@torch.no_grad()
def turn_gae_advantage(
    rewards_B: Tensor, returns_B: Tensor, values_B: Tensor, parent_B: Tensor, gamma: float, lam: float
) -> TurnGae:
    """Return generalised advantage estimates over turns as steps, along trees.  [B] → [B] each.

    δ_t = r_t + γ · mean V_c − V_t;  A_t = δ_t + γλ · mean A_c, over the turns c that continue t;  returns = A + V.
    V_t is the value of the state in which turn t begins; tokens of a turn share its advantage. `parent_B` holds the row
    that each turn continues, or −1, also where others that continue it are missing. Where no row continues a turn,
    A_t = G_t − V_t with `returns_B`: G is the reward of the last turn of a line, and includes what came after in turns
    that are not in the batch.
    Schulman et al., 2016, with the turns of an episode instead of tokens.
    """
    check_same_shape(rewards_B=rewards_B, returns_B=returns_B, values_B=values_B, parent_B=parent_B)
    parents, following = parent_B.tolist(), [list[int]() for _ in range(len(parent_B))]
    for row, parent in enumerate(parents):
        if parent >= 0:
            following[parent].append(row)
    order = [row for row, parent in enumerate(parents) if parent < 0]  # parents before those that continue them
    for row in order:
        order += following[row]
    advantages_B = returns_B - values_B
    for row in reversed(order):
        if later := following[row]:
            delta = rewards_B[row] + gamma * values_B[later].mean() - values_B[row]
            advantages_B[row] = delta + gamma * lam * advantages_B[later].mean()
    return TurnGae(advantages_B, advantages_B + values_B)


@torch.no_grad()
def group_advantage(
    rewards_B: Tensor,
    group_B: Tensor,
    *,
    scale_by_std: bool = True,
    eps: float = 1e-6,
    attempt_B: Tensor | None = None,
) -> Tensor:
    """Return (R − group mean) / (group std + eps), std with Bessel's correction.  [B] → [B].

    `group_B` holds integer labels. With `attempt_B`, labels of attempts of several turns, every attempt weighs the same
    in mean and std, and shares its weight among its turns. `scale_by_std=False` gives R − mean, as in Dr.GRPO.
    Shao et al., 2024 (GRPO); Liu et al., 2025 (Dr.GRPO).
    Raises SingletonGroup, with the group's label, where a group has one reply, or one attempt, only.
    """
    group = _centre_by_group(rewards_B, group_B, attempt_B)
    if not scale_by_std:
        return group.centred_B
    return group.centred_B / ((group.squares_B / (group.count_B - 1)).sqrt() + eps)


@torch.no_grad()
def leave_one_out_advantage(rewards_B: Tensor, group_B: Tensor, *, attempt_B: Tensor | None = None) -> Tensor:
    """Return R_i − mean of the others' rewards, which is n/(n−1) · (R_i − group mean).  [B] → [B].

    With `attempt_B` the others are the other attempts, each with the mean reward of its turns.
    Ahmadian et al., 2024 (RLOO).  Raises SingletonGroup, as `group_advantage` does.
    """
    group = _centre_by_group(rewards_B, group_B, attempt_B)
    return group.centred_B + group.attempt_B / (group.count_B - 1)  # the others' deviations add up to −attempt_B


@torch.no_grad()
def anchor_state_advantage(
    returns_B: Tensor, state_B: Tensor, *, scale_by_std: bool = True, eps: float = 1e-6
) -> Tensor:
    """Return (G − mean) / (std + eps) over the returns G of the turns in the same state.  [B] → [B].

    `state_B` holds integer labels of the (anchor) states, as `find_anchor_states` returns. It is 0 for a turn in a
    state of its own. A state that an episode has visited twice counts twice, as in the paper.
    Feng et al., 2025: the second part of GiGPO, of which `group_advantage` of the episodes is the first.
    """
    check_same_shape(returns_B=returns_B, state_B=state_B)
    _, slot_B, count_G = torch.unique(state_B, return_inverse=True, return_counts=True)
    is_shared_B = count_G[slot_B] > 1
    advantages_B = torch.zeros_like(returns_B)
    if is_shared_B.any():
        advantages_B[is_shared_B] = group_advantage(
            returns_B[is_shared_B], state_B[is_shared_B], scale_by_std=scale_by_std, eps=eps
        )
    return advantages_B


@torch.no_grad()
def reinforce_plus_plus_advantage(
    rewards_BT: Tensor,
    mask_BT: Tensor,
    *,
    gamma: float = 1.0,
    group_B: Tensor | None = None,
    attempt_B: Tensor | None = None,
    weights_B: Tensor | None = None,
) -> Tensor:
    """Return discounted returns, whitened over all tokens of the batch.  [B, T] → [B, T]; 0 outside the mask.

    `weights_B` are the weights of the sequences in the whitening.

    Without groups: G_t = r_t + γ·G_{t+1} over the tokens inside the mask, then `whiten`.
    With `group_B` [B]: the sum of a sequence's rewards minus the group's mean, for every token, then `whiten`; with
    `attempt_B` the mean over the group's attempts.
    Hu et al., 2025 (REINFORCE++ and REINFORCE++-baseline).
    Raises SingletonGroup as `group_advantage` does, ValueError for a gamma other than 1 with groups.
    """
    check_same_shape(rewards_BT=rewards_BT, mask_BT=mask_BT)
    if group_B is not None:
        if gamma != 1.0:
            raise ValueError(f"with groups, rewards are summed without a discount, so gamma must be 1, not {gamma}")
        centred_B = _centre_by_group(apply_mask(rewards_BT, mask_BT).sum(-1), group_B, attempt_B).centred_B
        return whiten(centred_B[:, None].expand_as(rewards_BT), mask_BT, weights_B=weights_B)
    returns_BT = torch.zeros_like(rewards_BT)
    return_B = rewards_BT.new_zeros(len(rewards_BT))
    for t in reversed(range(rewards_BT.shape[1])):
        return_B = torch.where(mask_BT[:, t].bool(), rewards_BT[:, t] + gamma * return_B, return_B)
        returns_BT[:, t] = return_B
    return whiten(returns_BT, mask_BT, weights_B=weights_B)


@torch.no_grad()
def running_baseline(
    rewards_B: Tensor, baseline: float, decay: float, weights_B: Tensor | None = None
) -> tuple[Tensor, float]:
    """Return A = R − b and the new baseline d·b + (1−d)·mean(R): a reward is never part of its own baseline.

    [B] → [B].  With `weights_B` the mean is weighted.
    Liu et al., 2025 (SPIRAL, role-conditioned advantage estimation).
    """
    mean = rewards_B.mean() if weights_B is None else (weights_B * rewards_B).sum() / weights_B.sum()
    return rewards_B - baseline, decay * baseline + (1 - decay) * float(mean)


@torch.no_grad()
def discounted_turn_returns(rewards_B: Tensor, conversation_B: Tensor, turn_B: Tensor, discount: float) -> Tensor:
    """Return G = r + discount · G(next turn of the same conversation in the batch).  [B] → [B].

    `conversation_B` and `turn_B` are integers: the conversation, and the turn's index in it. The order in the batch
    does not matter. Missing turns are skipped, without a discount for the gap. With discount 0 every turn keeps its own
    reward. This is the discounted return (Sutton & Barto, 2018, §3.3) with turns as steps.
    Raises AlignmentError where a turn occurs twice (two candidates), because it is unknown which one was continued.
    """
    check_same_shape(rewards_B=rewards_B, conversation_B=conversation_B, turn_B=turn_B)
    if discount == 0:
        return rewards_B.clone()
    rewards = rewards_B.tolist()
    places = list(zip(conversation_B.tolist(), turn_B.tolist(), strict=True))
    returns = [0.0] * len(rewards)
    next_place: tuple[int, int] | None = None
    value = 0.0
    for index in sorted(range(len(places)), key=places.__getitem__, reverse=True):
        conversation, turn = places[index]
        if places[index] == next_place:
            raise AlignmentError(f"turn {turn} of conversation {conversation} occurs twice; a batch may hold it once")
        has_next = next_place is not None and next_place[0] == conversation
        value = rewards[index] + (discount * value if has_next else 0.0)
        returns[index] = value
        next_place = places[index]
    return torch.tensor(returns, dtype=rewards_B.dtype, device=rewards_B.device)


def _centre_by_group(rewards_B: Tensor, group_B: Tensor, attempt_B: Tensor | None) -> CentredRewards:
    check_same_shape(rewards_B=rewards_B, group_B=group_B)
    if attempt_B is None:
        attempt_B = torch.arange(len(group_B), device=group_B.device)
    labels_G, slot_B = torch.unique(group_B, return_inverse=True)
    # The attempts A of the groups: one that has turns in two groups is an attempt of each.
    pairs_2A, pair_B = torch.unique(torch.stack([slot_B, attempt_B]), dim=1, return_inverse=True)
    slot_A, turns_A = pairs_2A[0], torch.bincount(pair_B).to(rewards_B.dtype)
    count_G = torch.bincount(slot_A, minlength=len(labels_G))
    singletons = labels_G[count_G == 1].tolist()
    if singletons:
        raise SingletonGroup(f"group {singletons[0]} has one reply only, so there is nothing to compare it with")

    def group_sum(x_A: Tensor) -> Tensor:
        return torch.zeros(len(labels_G), dtype=x_A.dtype, device=x_A.device).index_add(0, slot_A, x_A)

    # Subtract the group's smallest reward first: rewards that are equal but for rounding are then exactly 0 after
    # centring. A division by their deviation, or whitening, would make rounding as large as a preference.
    least_G = torch.full_like(count_G, torch.inf, dtype=rewards_B.dtype).scatter_reduce(0, slot_B, rewards_B, "amin")
    above_B = rewards_B - least_G[slot_B]
    above_B = torch.where(above_B > TOLERANCE, above_B, torch.zeros_like(above_B))
    above_A = torch.zeros_like(turns_A).index_add(0, pair_B, above_B) / turns_A
    count_of_G = count_G.to(rewards_B.dtype)
    mean_G = group_sum(above_A) / count_of_G
    centred_B, attempt_A = above_B - mean_G[slot_B], above_A - mean_G[slot_A]
    squares_A = torch.zeros_like(turns_A).index_add(0, pair_B, centred_B.square()) / turns_A
    return CentredRewards(centred_B, attempt_A[pair_B], group_sum(squares_A)[slot_B], count_of_G[slot_B])
