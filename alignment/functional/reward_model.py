"""What a reward model is fitted by, and how well it is said to know: losses on scores, calibration, agreement.

Suffixes as in the package; a score is one number a reply, of any scale. N is thumbs or replies.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from alignment.functional.arguments import same_shape


class Platt(NamedTuple):
    """From score to probability: σ(scale·s + shift). Example: Platt(1.7, -0.2)"""

    scale: float
    shift: float


def bradley_terry_loss(chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
    """−log σ(s_chosen − s_rejected): the chosen reply wins with probability σ of the difference.  [P] → [P]

    Bradley & Terry, 1952; as the loss of a reward model: Stiennon et al., 2020, Ouyang et al., 2022.
    Raises ValueError for shapes that do not match.
    """
    same_shape(chosen_P=chosen_P, rejected_P=rejected_P)
    return -logsigmoid(chosen_P - rejected_P)


def thumb_loss(scores_N: Tensor, values_N: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    """−p log σ(s − b) − (1 − p) log σ(b − s) with p = (1 + value) / 2.  [N] → [N]

    A thumb up or down, value ±1, gives −log σ(±(s − b)): the reply against one of score b, which is neither good nor
    bad; a score or rating between them is a thumb of which a share is up. `values_N` are constants in [-1, 1].
    Raises ValueError for shapes that do not match.
    """
    same_shape(scores_N=scores_N, values_N=values_N)
    margin_N, share_N = scores_N - bias, (1 + values_N.detach()) / 2
    return -share_N * logsigmoid(margin_N) - (1 - share_N) * logsigmoid(-margin_N)


def platt(
    scores_N: Tensor,
    values_N: Tensor,
    weights_N: Tensor,
    margins_P: Tensor,
    pair_weights_P: Tensor,
    *,
    pull: float = 1.0,
    steps: int = 100,
) -> Platt:
    """The scale and shift under which thumbs and pairs that were held out are likeliest.

    Minimises Σ w·thumb_loss(scale·s + shift) + Σ w·(−log σ(scale·m)) + pull/2·((scale − 1)² + shift²) by Newton's
    method (Platt, 1999; of pairs only the scale is learned). `margins_P` are s_chosen − s_rejected. `pull` is a normal
    prior around "as it is" with the weight of one word, so that few words, or words that the scores part without
    fault, give finite numbers. Convex, so the way there does not matter; a step that makes it worse is halved.
    Raises ValueError for shapes that do not match.
    """
    same_shape(scores_N=scores_N, values_N=values_N, weights_N=weights_N)
    same_shape(margins_P=margins_P, pair_weights_P=pair_weights_P)
    parts = scores_N, values_N, weights_N, margins_P, pair_weights_P
    score_N, value_N, weight_N, margin_P, pair_P = (part.detach().double().cpu() for part in parts)
    inputs_M2 = torch.cat(
        [torch.stack([score_N, torch.ones_like(score_N)], -1), torch.stack([margin_P, torch.zeros_like(margin_P)], -1)]
    )
    share_M = torch.cat([(1 + value_N) / 2, torch.ones_like(margin_P)])
    weight_M = torch.cat([weight_N, pair_P])
    start_2 = torch.tensor([1.0, 0.0], dtype=torch.float64)

    def cost(at_2: Tensor) -> Tensor:
        margin_M = inputs_M2 @ at_2
        loss_M = -share_M * logsigmoid(margin_M) - (1 - share_M) * logsigmoid(-margin_M)
        return (weight_M * loss_M).sum() + pull / 2 * (at_2 - start_2).square().sum()

    at_2 = start_2.clone()
    for _ in range(steps):
        chance_M = torch.sigmoid(inputs_M2 @ at_2)
        slope_2 = inputs_M2.T @ (weight_M * (chance_M - share_M)) + pull * (at_2 - start_2)
        curve_22 = (inputs_M2.T * (weight_M * chance_M * (1 - chance_M))) @ inputs_M2 + pull * torch.eye(2).double()
        step_2 = torch.linalg.solve(curve_22, slope_2)
        length = 1.0
        while cost(at_2 - length * step_2) > cost(at_2) and length > 1e-9:
            length /= 2
        at_2 = at_2 - length * step_2
        if float(step_2.abs().max()) < 1e-10:
            break
    return Platt(float(at_2[0]), float(at_2[1]))


def calibration_error(chances_N: Tensor, values_N: Tensor, weights_N: Tensor | None = None, bins: int = 10) -> float:
    """The expected calibration error: Σ over bins of their share times |mean chance − share of thumbs up|.

    Bins of equal width over [0, 1] (Naeini et al., 2015; Guo et al., 2017). 0 is perfect. A value between -1 and 1 is a
    thumb of which (1 + value) / 2 is up. Raises ValueError for shapes that do not match.
    """
    weights_N = torch.ones_like(chances_N) if weights_N is None else weights_N
    same_shape(chances_N=chances_N, values_N=values_N, weights_N=weights_N)
    chance_N, weight_N = chances_N.double(), weights_N.double()
    gap_N = weight_N * (chance_N - (1 + values_N.double()) / 2)
    bin_N = (chance_N * bins).long().clamp(0, bins - 1)
    gap_B = torch.zeros(bins, dtype=torch.float64).index_add(0, bin_N, gap_N)
    return float(gap_B.abs().sum() / weight_N.sum())


def auc(scores_N: Tensor, up_N: Tensor) -> float | None:
    """The chance that a reply with a thumb up scores above one with a thumb down, ties counting half; None when there
    is but one of the two. The Mann–Whitney U over n₊·n₋ (Hanley & McNeil, 1982). `up_N` is bool."""
    same_shape(scores_N=scores_N, up_N=up_N)
    up_N = up_N.bool()
    above, below = scores_N[up_N].double(), scores_N[~up_N].double().sort().values
    if not len(above) or not len(below):
        return None
    wins = torch.searchsorted(below, above) + torch.searchsorted(below, above, right=True)
    return float(wins.double().mean() / (2 * len(below)))
