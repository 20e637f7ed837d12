"""Batches that are small enough to compute by hand, in the layout of the trainer."""

from collections.abc import Sequence

import torch
from torch import Tensor

from alignment.algorithms import RLAlgorithm
from alignment.trainer.loss_reduction import LossReducer, MinibatchCounts
from alignment.trainer.metrics import MetricAccumulator
from alignment.types import CriticMicroBatch, MicroBatch, Sample, TrainData


def reply(reward: float, length: int = 2, group: str | None = None, **others: object) -> Sample:
    fields = {"turn_id": "t", "prompt_ids": (1,), "version": 0} | others
    return Sample(output_ids=(5,) * length, logprobs=(-1.0,) * length, reward=reward, group=group, **fields)  # type: ignore[arg-type]


def make_train_data(samples: Sequence[Sample], **tensors: Tensor) -> TrainData:
    """Return a batch as tensors. Log-probs that are not passed are −1."""
    longest = max(len(sample.output_ids) for sample in samples)
    response_mask_BT = torch.tensor([[float(t < len(s.output_ids)) for t in range(longest)] for s in samples])
    default_BT = -response_mask_BT
    weights_B = torch.tensor([sample.weight for sample in samples])
    fields = dict.fromkeys(("rollout_logprobs_BT", "old_logprobs_BT", "ref_logprobs_BT"), default_BT) | tensors
    if len(set(weights_B.tolist())) > 1:
        fields["weights_B"] = weights_B / weights_B.mean()
    return TrainData(samples, response_mask_BT, torch.tensor([s.reward for s in samples]), **fields)  # type: ignore[arg-type]


def reduce_loss(
    algorithm: RLAlgorithm,
    data: TrainData,
    logprobs_BT: Tensor | None = None,
    *,
    rows_per_micro_batch: int | None = None,
    entropy_BT: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Return the loss of the batch as one minibatch, and its metrics with `loss`, as the trainer computes them.

    The current log-probs are the old ones by default.
    """
    scored_BT = data.old_logprobs_BT if logprobs_BT is None else logprobs_BT
    assert scored_BT is not None
    coupled, indices = algorithm.coupled_samples(data.samples), tuple(range(len(data.samples)))
    reducer = LossReducer(MinibatchCounts.of(data, indices, coupled), algorithm.aggregation, algorithm.horizon)
    accumulator, losses = MetricAccumulator(), []
    size = rows_per_micro_batch or len(indices)
    for start in range(0, len(indices), size):
        rows = indices[start : start + size]
        sets = tuple(tuple(i - start for i in members) for members in coupled if members[0] in rows)
        entropies_BT = None if entropy_BT is None else entropy_BT[list(rows)]
        inputs = MicroBatch(data, rows, sets, scored_BT[list(rows)], entropies_BT)
        reduced = reducer.reduce(algorithm.compute_loss(inputs), inputs, "actor/pg_loss")
        accumulator.add(reduced, 1.0)
        losses.append(reduced.loss)
    loss = torch.stack(losses).sum()
    return loss, accumulator.totals() | {"loss": loss.item()}


def reduce_value_loss(algorithm: RLAlgorithm, data: TrainData, values_BT: Tensor) -> dict[str, float]:
    """Return the metrics of the critic's loss on the batch as one minibatch, with `loss`."""
    indices, accumulator = tuple(range(len(data.samples))), MetricAccumulator()
    inputs = CriticMicroBatch(data, indices, (), values_BT)
    reducer = LossReducer(MinibatchCounts.of(data, indices, ()))
    reduced = reducer.reduce(algorithm.compute_value_loss(inputs), inputs, "critic/vf_loss")
    accumulator.add(reduced, 1.0)
    return accumulator.totals() | {"loss": reduced.loss.item()}


def gradient(algorithm: RLAlgorithm, data: TrainData, logprobs_BT: Tensor | None = None) -> Tensor:
    """Return the gradient of the loss with respect to each log-prob."""
    assert data.old_logprobs_BT is not None
    leaf_BT = (data.old_logprobs_BT if logprobs_BT is None else logprobs_BT).clone().requires_grad_()
    reduce_loss(algorithm, data, leaf_BT)[0].backward()
    assert leaf_BT.grad is not None
    return leaf_BT.grad
