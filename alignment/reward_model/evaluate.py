"""Evaluation of a reward model on held-out examples, and the calibration from score to reward.

Tensor suffixes: N labels, P pairs. Tensors are float64 on the CPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from alignment.functional import PlattScaling, auc, calibration_error, fit_platt_scaling
from alignment.reward_model.dataset import PreferenceDataset, select_held_out, split
from alignment.signals.agreement import Agreement
from alignment.tolerance import TOLERANCE

IDENTITY = PlattScaling(1.0, 0.0)
MIN_SPREAD = 1e-6  # standard deviation of scores that are all equal
MIN_SCALE = 1e-3  # a negative scale would reverse what the model has learned


@dataclass(frozen=True)
class ScoredExamples:
    """The examples of a dataset as tensors, with the scores of their replies."""

    scores_N: Tensor
    values_N: Tensor
    weights_N: Tensor
    margins_P: Tensor  # score of the chosen reply − score of the rejected one
    weights_P: Tensor

    @classmethod
    def from_dataset(cls, dataset: PreferenceDataset, scores: Tensor) -> "ScoredExamples":
        """`scores` has one score for each of `dataset.replies`."""
        scores = scores.double().cpu()

        def tensor(numbers: Sequence[float]) -> Tensor:
            return torch.tensor(numbers, dtype=torch.float64)

        def scores_at(indices: Sequence[int]) -> Tensor:
            return scores[torch.tensor(indices, dtype=torch.long)]

        return cls(
            scores_at([label.reply for label in dataset.labels]),
            tensor([label.value for label in dataset.labels]),
            tensor([label.weight for label in dataset.labels]),
            scores_at([pair.chosen for pair in dataset.pairs]) - scores_at([pair.rejected for pair in dataset.pairs]),
            tensor([pair.weight for pair in dataset.pairs]),
        )


def scores_to_rewards(scores_N: Tensor, platt: PlattScaling) -> Tensor:
    """Return 2σ(scale·s + shift) − 1, the expected value of a label, in [-1, 1].  [N] → [N]"""
    return 2 * scores_to_probabilities(scores_N, platt) - 1


def scores_to_probabilities(scores_N: Tensor, platt: PlattScaling) -> Tensor:
    """Return σ(scale·s + shift), the probability of a positive label.  [N] → [N]"""
    return torch.sigmoid(platt.scale * scores_N + platt.shift)


def calibrate(dataset: PreferenceDataset, scores: Tensor) -> PlattScaling:
    """Fit the calibration on a dataset (Platt, 1999).

    It is fitted to standardised scores, since those of a model that was fitted on little feedback differ by little, and
    the fit prefers a scale near 1. Pairs alone determine no absolute level; the shift then makes the reward of the mean
    reply 0.
    """
    indices = sorted({index for example in dataset.examples for index in example.reply_indices})
    used_scores = scores.double().cpu()[indices]
    mean, spread = float(used_scores.mean()), max(float(used_scores.std(correction=0)), MIN_SPREAD)
    examples = ScoredExamples.from_dataset(dataset, (scores.double().cpu() - mean) / spread)
    platt = fit_platt_scaling(
        examples.scores_N, examples.values_N, examples.weights_N, examples.margins_P, examples.weights_P
    )
    scale = max(platt.scale, MIN_SCALE)
    return PlattScaling(scale / spread, (platt.shift if dataset.labels else 0.0) - scale * mean / spread)


def evaluate(dataset: PreferenceDataset, scores: Tensor, seed: int) -> dict[str, float]:
    """Return the metrics of a held-out dataset; a metric without examples is missing.

    Metrics that depend on a calibration are computed by two-fold cross-fitting: each half is measured with the
    calibration of the other.
    """
    halves = split(dataset, select_held_out(dataset, 0.5, seed))
    whole = ScoredExamples.from_dataset(dataset, scores)
    examples = [ScoredExamples.from_dataset(half, scores) for half in halves]
    calibrations = [calibrate(half, scores) if len(half) else IDENTITY for half in reversed(halves)]
    probabilities_N = torch.cat(
        [scores_to_probabilities(half.scores_N, platt) for half, platt in zip(examples, calibrations, strict=True)]
    )
    values_N = torch.cat([half.values_N for half in examples])
    weights_N = torch.cat([half.weights_N for half in examples])
    rewards = (2 * probabilities_N - 1).tolist()
    agreement = Agreement.count(zip(values_N.tolist(), rewards, strict=True), whole.margins_P.tolist())
    nonzero = whole.values_N.abs() > TOLERANCE
    metrics = {
        "agreement": agreement.rate,
        "pair_accuracy": _ratio(agreement.pairs_right, agreement.pairs),
        "thumb_accuracy": _ratio(agreement.ups_right + agreement.downs_right, agreement.ups + agreement.downs),
        "thumb_auc": auc(whole.scores_N[nonzero], whole.values_N[nonzero] > 0),
    }
    if dataset.labels:
        before_N = scores_to_probabilities(whole.scores_N, IDENTITY)
        metrics["calibration_error_before"] = calibration_error(before_N, whole.values_N, whole.weights_N)
        metrics["calibration_error"] = calibration_error(probabilities_N, values_N, weights_N)
    return {name: value for name, value in metrics.items() if value is not None}


def _ratio(count: int, total: int) -> float | None:
    return count / total if total else None
