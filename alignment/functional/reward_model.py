"""Losses, calibration and accuracy measures of reward models.

Suffixes are those of the package; N counts labels or replies. A score is one number per reply, on any scale.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from alignment.functional.aggregation import check_same_shape
from alignment.tolerance import TOLERANCE


class PlattScaling(NamedTuple):
    """The map from a score to a probability: σ(scale·s + shift). Example: PlattScaling(1.7, -0.2)"""

    scale: float
    shift: float


def bradley_terry_loss(chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
    """Return −log σ(s_chosen − s_rejected).  [P] → [P]

    Bradley & Terry, 1952; as the loss of a reward model: Stiennon et al., 2020, Ouyang et al., 2022.
    Raises ValueError for mismatched shapes.
    """
    check_same_shape(chosen_P=chosen_P, rejected_P=rejected_P)
    return -logsigmoid(chosen_P - rejected_P)


def binary_feedback_loss(scores_N: Tensor, values_N: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    """Return −p log σ(s − b) − (1 − p) log σ(b − s) with p = (1 + value) / 2.  [N] → [N]

    This is binary cross-entropy with soft labels. A binary label, value ±1, gives −log σ(±(s − b)): the reply against
    a neutral one of score b. A score or rating in between is a soft label. `values_N` are constants in [-1, 1].
    Raises ValueError for mismatched shapes.
    """
    check_same_shape(scores_N=scores_N, values_N=values_N)
    margin_N, target_N = scores_N - bias, (1 + values_N.detach()) / 2
    return -target_N * logsigmoid(margin_N) - (1 - target_N) * logsigmoid(-margin_N)


def fit_platt_scaling(
    scores_N: Tensor,
    values_N: Tensor,
    weights_N: Tensor,
    margins_P: Tensor,
    pair_weights_P: Tensor,
    *,
    prior: float = 1.0,
    steps: int = 100,
) -> PlattScaling:
    """Fit the scale and shift that maximise the likelihood of held-out labels and pairs.

    Minimises Σ w·binary_feedback_loss(scale·s + shift) + Σ w·(−log σ(scale·m)) + prior/2·((scale − 1)² + shift²) by
    Newton's method (Platt, 1999); pairs determine the scale only. `margins_P` are s_chosen − s_rejected. `prior` is the
    precision of a normal prior around scale 1 and shift 0. It counts as one label, so the result is finite for few
    labels and for labels that the scores separate perfectly. The problem is convex; a step that does not improve the
    objective is halved.
    Raises ValueError for mismatched shapes.
    """
    check_same_shape(scores_N=scores_N, values_N=values_N, weights_N=weights_N)
    check_same_shape(margins_P=margins_P, pair_weights_P=pair_weights_P)
    parts = scores_N, values_N, weights_N, margins_P, pair_weights_P
    score_N, value_N, weight_N, margin_P, pair_P = (part.detach().double().cpu() for part in parts)
    inputs_M2 = torch.cat(
        [torch.stack([score_N, torch.ones_like(score_N)], -1), torch.stack([margin_P, torch.zeros_like(margin_P)], -1)]
    )
    target_M = torch.cat([(1 + value_N) / 2, torch.ones_like(margin_P)])
    weight_M = torch.cat([weight_N, pair_P])
    start_2 = torch.tensor([1.0, 0.0], dtype=torch.float64)

    def objective(params_2: Tensor) -> Tensor:
        margin_M = inputs_M2 @ params_2
        loss_M = -target_M * logsigmoid(margin_M) - (1 - target_M) * logsigmoid(-margin_M)
        return (weight_M * loss_M).sum() + prior / 2 * (params_2 - start_2).square().sum()

    params_2 = start_2.clone()
    for _ in range(steps):
        probability_M = torch.sigmoid(inputs_M2 @ params_2)
        gradient_2 = inputs_M2.T @ (weight_M * (probability_M - target_M)) + prior * (params_2 - start_2)
        curvature_M = weight_M * probability_M * (1 - probability_M)
        hessian_22 = (inputs_M2.T * curvature_M) @ inputs_M2 + prior * torch.eye(2).double()
        step_2 = torch.linalg.solve(hessian_22, gradient_2)
        step_size = 1.0
        while objective(params_2 - step_size * step_2) > objective(params_2) and step_size > 1e-9:
            step_size /= 2
        params_2 = params_2 - step_size * step_2
        if float(step_2.abs().max()) < 1e-10:
            break
    return PlattScaling(float(params_2[0]), float(params_2[1]))


def calibration_error(
    probabilities_N: Tensor, values_N: Tensor, weights_N: Tensor | None = None, bins: int = 10
) -> float:
    """Return the expected calibration error: Σ over bins of weight · |mean probability − mean label|.

    Bins have equal width over [0, 1] (Naeini et al., 2015; Guo et al., 2017); 0 is perfect. A value in [-1, 1] is the
    soft label (1 + value) / 2. Raises ValueError for mismatched shapes.
    """
    weights_N = torch.ones_like(probabilities_N) if weights_N is None else weights_N
    check_same_shape(probabilities_N=probabilities_N, values_N=values_N, weights_N=weights_N)
    probability_N, weight_N = probabilities_N.double(), weights_N.double()
    gap_N = weight_N * (probability_N - (1 + values_N.double()) / 2)
    bin_N = (probability_N * bins).long().clamp(0, bins - 1)
    gap_B = torch.zeros(bins, dtype=torch.float64).index_add(0, bin_N, gap_N)
    return float(gap_B.abs().sum() / weight_N.sum())


def auc(scores_N: Tensor, positive_N: Tensor) -> float | None:
    """Return the probability that a positive reply scores higher than a negative one; ties within TOLERANCE count half.

    This is Mann–Whitney U over n₊·n₋ (Hanley & McNeil, 1982). `positive_N` is bool. None where one class is missing.
    """
    check_same_shape(scores_N=scores_N, positive_N=positive_N)
    positive_N = positive_N.bool()
    positive_scores, negative_scores = scores_N[positive_N].double(), scores_N[~positive_N].double().sort().values
    if not len(positive_scores) or not len(negative_scores):
        return None
    wins = torch.searchsorted(negative_scores, positive_scores - TOLERANCE) + torch.searchsorted(
        negative_scores, positive_scores + TOLERANCE, right=True
    )
    return float(wins.double().mean() / (2 * len(negative_scores)))
