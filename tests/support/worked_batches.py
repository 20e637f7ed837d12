"""Batches small enough to work out by hand, as the learner lays them out."""

from collections.abc import Sequence

import torch
from torch import Tensor

from alignment.algorithms import MicroBatch, RLAlgorithm, TrainData
from alignment.types import Sample


def reply(reward: float, length: int = 2, group: str | None = None, **others: object) -> Sample:
    fields = {"turn_id": "t", "prompt_ids": (1,), "version": 0} | others
    return Sample(output_ids=(5,) * length, logprobs=(-1.0,) * length, reward=reward, group=group, **fields)  # type: ignore[arg-type]


def lay(samples: Sequence[Sample], **scored: Tensor) -> TrainData:
    """Every policy gives every token a log-prob of −1, unless told otherwise."""
    longest = max(len(sample.output_ids) for sample in samples)
    mask_BT = torch.tensor([[float(t < len(s.output_ids)) for t in range(longest)] for s in samples])
    same_BT = -mask_BT
    given = {"rollout_BT": same_BT, "parent_BT": same_BT, "reference_BT": same_BT} | scored
    return TrainData(samples, mask_BT, torch.tensor([sample.reward for sample in samples]), **given)  # type: ignore[arg-type]


def whole(data: TrainData, scored_BT: Tensor | None = None) -> MicroBatch:
    """The whole batch as one micro-batch, scored as the parent scores it unless told otherwise."""
    rows = tuple(range(len(data.samples)))
    scored_BT = data.parent_BT if scored_BT is None else scored_BT
    assert scored_BT is not None
    return MicroBatch(data, rows, scored_BT, int(data.mask_BT.sum()), len(rows), rows)


def gradient(algorithm: RLAlgorithm, data: TrainData, scored_BT: Tensor | None = None) -> Tensor:
    """Of the loss by each log-prob."""
    assert data.parent_BT is not None
    leaf_BT = (data.parent_BT if scored_BT is None else scored_BT).clone().requires_grad_()
    algorithm.compute_loss(whole(data, leaf_BT))["loss"].backward()
    assert leaf_BT.grad is not None
    return leaf_BT.grad
