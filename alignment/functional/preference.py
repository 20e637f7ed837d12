"""Preference losses on whole replies: DPO and its variants on pairs, KTO on single binary labels.

All log-probs are sums over a reply's tokens, in nats; lengths are counts of those tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from alignment.config.preference_algorithms import PairKind, UnpairedKind
from alignment.functional.aggregation import check_literal, check_same_shape


class PreferenceLoss(NamedTuple):
    """A loss per pair, and the implicit rewards β·(log π − log ref) of both sides, detached."""

    loss_P: Tensor
    chosen_rewards_P: Tensor
    rejected_rewards_P: Tensor


class KTOLoss(NamedTuple):
    """A loss per reply, and its implicit reward β·(log π − log ref), detached."""

    loss_B: Tensor
    rewards_B: Tensor


def dpo_loss(
    chosen_P: Tensor,
    rejected_P: Tensor,
    ref_chosen_P: Tensor,
    ref_rejected_P: Tensor,
    *,
    beta: float = 0.1,
    kind: PairKind = "sigmoid",
    label_smoothing: float = 0.0,
    chosen_length_P: Tensor | None = None,
    rejected_length_P: Tensor | None = None,
) -> PreferenceLoss:
    """Return DPO-style losses and implicit rewards of preference pairs.  [P] → [P] each.

    With c = chosen − ref_chosen, j = rejected − ref_rejected, d = c − j, ε = label_smoothing, n lengths in tokens:
    sigmoid   −(1−ε)·log σ(βd) − ε·log σ(−βd)               Rafailov et al., 2023; ε > 0: Mitchell, 2023 (cDPO)
    ipo       (c/n_c − j/n_r − 1/(2β))², needs both lengths  Azar et al., 2023, length-normalised as in TRL
    hinge     max(0, 1 − βd)                                 Zhao et al., 2023 (SLiC)
    robust    (−(1−ε)·log σ(βd) + ε·log σ(−βd)) / (1 − 2ε)   Chowdhury et al., 2024
    apo_zero  1 − σ(βc) + σ(βj)                              D'Oosterlinck et al., 2024
    apo_down  σ(βc) + 1 − σ(βd)                              the same
    Raises ValueError for an unknown kind, mismatched shapes, a smoothing outside [0, ½) or with a kind that does not
    support it, and ipo without lengths.
    """
    check_literal("preference loss", kind, PairKind)
    check_same_shape(chosen_P=chosen_P, rejected_P=rejected_P, ref_chosen_P=ref_chosen_P, ref_rejected_P=ref_rejected_P)
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must be in [0, 0.5), not {label_smoothing}")
    if label_smoothing and kind not in ("sigmoid", "robust"):
        raise ValueError(f"{kind} does not support label_smoothing: only sigmoid and robust do")
    chosen_gain_P, rejected_gain_P = chosen_P - ref_chosen_P.detach(), rejected_P - ref_rejected_P.detach()
    margin_P = beta * (chosen_gain_P - rejected_gain_P)
    if kind == "sigmoid":
        loss_P = -(1 - label_smoothing) * logsigmoid(margin_P) - label_smoothing * logsigmoid(-margin_P)
    elif kind == "robust":
        loss_P = -(1 - label_smoothing) * logsigmoid(margin_P) + label_smoothing * logsigmoid(-margin_P)
        loss_P = loss_P / (1 - 2 * label_smoothing)
    elif kind == "hinge":
        loss_P = (1 - margin_P).relu()
    elif kind == "apo_zero":
        loss_P = torch.sigmoid(-beta * chosen_gain_P) + torch.sigmoid(beta * rejected_gain_P)
    elif kind == "apo_down":
        loss_P = torch.sigmoid(beta * chosen_gain_P) + torch.sigmoid(-margin_P)
    else:
        if chosen_length_P is None or rejected_length_P is None:
            raise ValueError("ipo normalises log-probs by length and needs both lengths")
        check_same_shape(chosen_P=chosen_P, chosen_length_P=chosen_length_P, rejected_length_P=rejected_length_P)
        by_token_P = chosen_gain_P / chosen_length_P.clamp(min=1) - rejected_gain_P / rejected_length_P.clamp(min=1)
        loss_P = (by_token_P - 1 / (2 * beta)).square()
    return PreferenceLoss(loss_P, beta * chosen_gain_P.detach(), beta * rejected_gain_P.detach())


def kto_loss(
    logps_B: Tensor,
    ref_logps_B: Tensor,
    desirable_B: Tensor,
    *,
    kl: float | Tensor = 0.0,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    kind: UnpairedKind = "kto",
) -> KTOLoss:
    """Return KTO losses and implicit rewards of binary labels.  [B] → [B] each.

    With s = logps − ref_logps and z = max(kl, 0), a constant in nats (the mean of log π − log ref over replies paired
    with mismatched prompts):
    kto                desirable λ_D·(1 − σ(β(s − z))), undesirable λ_U·(1 − σ(β(z − s)))   Ethayarajh et al., 2024
    apo_zero_unpaired  the same with z = 0; kl is ignored                          D'Oosterlinck et al., 2024
    `desirable_B` is true for positive feedback. A batch may hold one class only.
    Raises ValueError for an unknown kind and mismatched shapes.
    """
    check_literal("unpaired loss", kind, UnpairedKind)
    check_same_shape(logps_B=logps_B, ref_logps_B=ref_logps_B, desirable_B=desirable_B)
    gain_B = logps_B - ref_logps_B.detach()
    reference_point = torch.as_tensor(kl if kind == "kto" else 0.0, dtype=gain_B.dtype, device=gain_B.device)
    margin_B = beta * (gain_B - reference_point.detach().clamp(min=0))
    desirable_B = desirable_B.bool()
    loss_B = torch.where(
        desirable_B,
        desirable_weight * torch.sigmoid(-margin_B),  # 1 − σ(x) = σ(−x), without the loss of digits
        undesirable_weight * torch.sigmoid(margin_B),
    )
    return KTOLoss(loss_B, beta * gain_B.detach())
