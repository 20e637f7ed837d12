"""How a fitted reward model does on words that it was not fitted on; and from score to reward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from alignment.functional import Platt, auc, calibration_error, platt
from alignment.reward_model.dataset import PreferenceDataset, held_out, split
from alignment.signals.agreement import Agreement

AS_IT_IS = Platt(1.0, 0.0)
LEAST_SCALE = 1e-3  # a scale below 0 would say that the model means the contrary of what it was taught


@dataclass(frozen=True)
class Heard:
    """Words as tensors, with the scores of the replies that they are about. N thumbs, P pairs."""

    scores_N: Tensor
    values_N: Tensor
    weights_N: Tensor
    margins_P: Tensor
    weights_P: Tensor

    @classmethod
    def of(cls, words: PreferenceDataset, scores: Tensor) -> "Heard":
        """`scores`: one for each of `words.replies`."""
        scores = scores.double().cpu()

        def tensor(numbers: Sequence[float]) -> Tensor:
            return torch.tensor(numbers, dtype=torch.float64)

        def told(places: Sequence[int]) -> Tensor:
            return scores[torch.tensor(places, dtype=torch.long)]

        return cls(
            told([thumb.reply for thumb in words.thumbs]),
            tensor([thumb.value for thumb in words.thumbs]),
            tensor([thumb.weight for thumb in words.thumbs]),
            told([pair.chosen for pair in words.pairs]) - told([pair.rejected for pair in words.pairs]),
            tensor([pair.weight for pair in words.pairs]),
        )


def values(scores_N: Tensor, by: Platt) -> Tensor:
    """2σ(scale·s + shift) − 1, a reward in [-1, 1]: what a thumb is expected to be worth."""
    return 2 * chances(scores_N, by) - 1


def chances(scores_N: Tensor, by: Platt) -> Tensor:
    """σ(scale·s + shift): how probable a thumb up is."""
    return torch.sigmoid(by.scale * scores_N + by.shift)


def calibrated(words: PreferenceDataset, scores: Tensor) -> Platt:
    """From these words. Where there are pairs alone, which know no absolute, the mean reply is worth 0."""
    heard = Heard.of(words, scores)
    by = platt(heard.scores_N, heard.values_N, heard.weights_N, heard.margins_P, heard.weights_P)
    scale = max(by.scale, LEAST_SCALE)
    if words.thumbs:
        return Platt(scale, by.shift)
    spoken = torch.tensor([place for pair in words.pairs for place in (pair.chosen, pair.rejected)])
    return Platt(scale, -scale * float(scores.double().cpu()[spoken].mean()))


def measured(words: PreferenceDataset, scores: Tensor, seed: int) -> dict[str, float]:
    """What is told of words that nothing was fitted on. What rests on a calibration is measured on one half after
    calibrating on the other, both ways, so that no word vouches for itself."""
    halves = split(words, held_out(words, 0.5, seed))
    before, after = [Heard.of(words, scores)], [Heard.of(half, scores) for half in halves]
    by = [calibrated(half, scores) if len(half) else AS_IT_IS for half in reversed(halves)]
    agreement = Agreement.of(
        [pair for heard, one in zip(after, by, strict=True) for pair in _compared(heard, one)],
        before[0].margins_P.tolist(),
    )
    said = before[0].values_N != 0
    told = {
        "agreement": agreement.share,
        "pair_accuracy": _share(agreement.pairs_right, agreement.pairs),
        "thumb_accuracy": _share(agreement.ups_right + agreement.downs_right, agreement.ups + agreement.downs),
        "thumb_auc": auc(before[0].scores_N[said], before[0].values_N[said] > 0),
        "calibration_error_before": _error(before, [AS_IT_IS]),
        "calibration_error": _error(after, by),
    }
    return {name: figure for name, figure in told.items() if figure is not None}


def _compared(heard: Heard, by: Platt) -> list[tuple[float, float]]:
    return list(zip(heard.values_N.tolist(), values(heard.scores_N, by).tolist(), strict=True))


def _error(parts: Sequence[Heard], by: Sequence[Platt]) -> float | None:
    def joined(take: Callable[[Heard], Tensor]) -> Tensor:
        return torch.cat([take(part) for part in parts])

    values_N = joined(lambda part: part.values_N)
    if not len(values_N):
        return None
    chances_N = torch.cat([chances(part.scores_N, one) for part, one in zip(parts, by, strict=True)])
    return calibration_error(chances_N, values_N, joined(lambda part: part.weights_N))


def _share(right: int, count: int) -> float | None:
    return right / count if count else None
