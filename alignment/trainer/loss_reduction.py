"""From the losses of a micro-batch to the number that is differentiated: the one place where losses are normalised.

A sum over a micro-batch is divided by what the whole minibatch holds, over all its micro-batches and ranks. The losses
of the micro-batches then add up to that of the minibatch, however it is split.

The confidence in a sample's reward multiplies its loss here, so that no algorithm depends on it. A pair has that of its
less certain reply. Regularizers, which do not depend on rewards, have no weight.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from alignment.config.policy_gradient_algorithms import Aggregation
from alignment.functional import aggregate
from alignment.types import BatchRows, LossOutput, LossUnit, Metric, TrainData


@dataclass(frozen=True)
class MinibatchCounts:
    """What a minibatch holds: the denominators of its losses."""

    tokens: int
    sequences: int
    coupled_sets: int

    @classmethod
    def of(cls, data: TrainData, minibatch: Sequence[int], coupled: Sequence[Sequence[int]]) -> "MinibatchCounts":
        """Count the minibatch; `coupled` are the sets of coupled samples of the batch, which are never split."""
        members = set(minibatch)
        return cls(
            tokens=int(data.response_mask_BT[list(minibatch)].sum()),
            sequences=len(minibatch),
            coupled_sets=sum(indices[0] in members for indices in coupled),
        )


class ReducedLoss(NamedTuple):
    """What a micro-batch adds to its minibatch: the loss to differentiate, its terms by name, and metrics.

    The terms are without their coefficients and without a gradient.
    """

    loss: Tensor
    terms: dict[str, Tensor]
    metrics: dict[str, Metric]


@dataclass(frozen=True)
class LossReducer:
    """Normalises the losses of one minibatch. `aggregation` and `horizon` are for losses per token."""

    counts: MinibatchCounts
    aggregation: Aggregation = "token-mean"
    horizon: int | None = None

    def reduce(self, output: LossOutput, inputs: BatchRows, name: str) -> ReducedLoss:
        """Return the loss of a micro-batch, whose first term has the given name.

        Raises ValueError for a loss or a metric that is summed or averaged already.
        """
        value = self._normalize(output.loss, output.unit, inputs, is_weighted=True)
        loss, terms = output.coef * value, {name: value.detach()}
        for regularizer_name, (coef, loss_BT) in output.regularizers.items():
            value = self._normalize(loss_BT, "token", inputs)
            loss = loss + coef * value
            terms[regularizer_name] = value.detach()
        return ReducedLoss(loss, terms, sum_metrics(output.metrics, inputs))

    def _normalize(
        self, loss: Tensor, unit: LossUnit | None, inputs: BatchRows, *, is_weighted: bool = False
    ) -> Tensor:
        mask_BT = inputs.response_mask_BT
        unit = unit or ("token" if loss.dim() == 2 else "sequence")
        lengths = {"sequence": len(mask_BT), "coupled_set": len(inputs.coupled_rows)}
        expected = list(mask_BT.shape) if unit == "token" else [lengths[unit]]
        if list(loss.shape) != expected:
            raise ValueError(
                f"a loss of shape {list(loss.shape)} is not one per {unit.replace('_', ' ')}, {expected}: "
                "return losses that are neither summed nor averaged, and the trainer does both"
            )
        if is_weighted and inputs.batch.weights_B is not None:
            loss = loss * _unit_weights(unit, inputs)
        if unit == "token":
            count = self.counts.tokens if self.aggregation == "token-mean" else self.counts.sequences
            return aggregate(loss, mask_BT, self.aggregation, denominator=count, horizon=self.horizon)
        count = self.counts.sequences if unit == "sequence" else self.counts.coupled_sets
        return loss.sum() / max(1, count)


def _unit_weights(unit: LossUnit, inputs: BatchRows) -> Tensor:
    """Return the weight of each loss: [B, 1] for losses per token, else one for each reply or set."""
    weights_B = inputs.weights_B
    if unit == "coupled_set":
        return torch.stack([weights_B[list(rows)].min() for rows in inputs.coupled_rows] or [weights_B.new_zeros(())])
    return weights_B[:, None] if unit == "token" else weights_B


def sum_metrics(metrics: Mapping[str, Tensor | Metric], inputs: BatchRows) -> dict[str, Metric]:
    """Return each metric as a sum and a count: of tokens without the padding for [B, T], of elements for a vector.

    Raises ValueError for a single number, whose count is not known.
    """
    mask_BT, sums = inputs.response_mask_BT, {}
    for name, value in metrics.items():
        if isinstance(value, Metric):
            sums[name] = value
        elif value.shape == mask_BT.shape:
            sums[name] = Metric(aggregate(value.detach().to(mask_BT.dtype), mask_BT, "token-sum"), mask_BT.sum())
        elif value.dim() == 1:
            sums[name] = Metric(value.detach().to(mask_BT.dtype).sum(), float(len(value)))
        else:
            raise ValueError(
                f"metric {name} of shape {list(value.shape)} is neither one value per token, {list(mask_BT.shape)}, "
                "nor a vector: return a Metric(sum, count)"
            )
    return sums
