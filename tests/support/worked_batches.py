"""Batches that are small enough to compute by hand, in the layout of the trainer."""

from collections.abc import Sequence

import torch
from torch import Tensor

from alignment.algorithms import RLAlgorithm
from alignment.types import MicroBatch, Sample, TrainData


def reply(reward: float, length: int = 2, group: str | None = None, **others: object) -> Sample:
    fields = {"turn_id": "t", "prompt_ids": (1,), "version": 0} | others
    return Sample(output_ids=(5,) * length, logprobs=(-1.0,) * length, reward=reward, group=group, **fields)  # type: ignore[arg-type]


def make_train_data(samples: Sequence[Sample], **tensors: Tensor) -> TrainData:
    """Return a batch as tensors. Log-probs that are not passed are −1."""
    longest = max(len(sample.output_ids) for sample in samples)
    mask_BT = torch.tensor([[float(t < len(s.output_ids)) for t in range(longest)] for s in samples])
    default_BT = -mask_BT
    fields = {"rollout_logprobs_BT": default_BT, "old_logprobs_BT": default_BT, "ref_logprobs_BT": default_BT} | tensors
    return TrainData(samples, mask_BT, torch.tensor([sample.reward for sample in samples]), **fields)  # type: ignore[arg-type]


def one_micro_batch(data: TrainData, scored_BT: Tensor | None = None) -> MicroBatch:
    """Return the batch as one micro-batch, by default with the old log-probs."""
    rows = tuple(range(len(data.samples)))
    scored_BT = data.old_logprobs_BT if scored_BT is None else scored_BT
    assert scored_BT is not None
    return MicroBatch(data, rows, scored_BT, int(data.mask_BT.sum()), len(rows), rows)


def gradient(algorithm: RLAlgorithm, data: TrainData, scored_BT: Tensor | None = None) -> Tensor:
    """Return the gradient of the loss with respect to each log-prob."""
    assert data.old_logprobs_BT is not None
    leaf_BT = (data.old_logprobs_BT if scored_BT is None else scored_BT).clone().requires_grad_()
    algorithm.compute_loss(one_micro_batch(data, leaf_BT))["loss"].backward()
    assert leaf_BT.grad is not None
    return leaf_BT.grad
