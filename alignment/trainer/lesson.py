"""A batch as tensors: all that the loss needs of it and that stays the same while it is learned from."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from alignment.algorithms import LossInputs
from alignment.samples import Sample
from alignment.trainer.packing import Scored, threads


@dataclass(frozen=True)
class Lesson:
    """B samples of up to T output tokens."""

    sequences: Sequence[Scored]
    mask_BT: Tensor
    parent_BT: Tensor
    reference_BT: Tensor
    weights_BT: Tensor
    advantages_BT: Tensor

    def inputs(self, minibatch: Sequence[int], group: Sequence[int], logprobs_BT: Tensor) -> LossInputs:
        """One micro-batch of a minibatch, with the minibatch's own counts to divide by."""
        rows = list(group)
        return LossInputs(
            logprobs_BT=logprobs_BT,
            parent_BT=self.parent_BT[rows],
            reference_BT=self.reference_BT[rows],
            weights_BT=self.weights_BT[rows],
            advantages_BT=self.advantages_BT[rows],
            mask_BT=self.mask_BT[rows],
            num_tokens=int(self.mask_BT[list(minibatch)].sum()),
            num_sequences=len(minibatch),
        )


def output_mask(sequences: Sequence[Scored], device: torch.device) -> Tensor:
    """1 for every scored token, 0 for the padding behind.  → [B, T]"""
    counts = torch.tensor([len(sequence.ids) - sequence.start for sequence in sequences])
    return (torch.arange(int(counts.max())) < counts[:, None]).float().to(device)


def recorded_logprobs(samples: Sequence[Sample], mask_BT: Tensor) -> Tensor:
    """What the engine said, laid out as the mask is.  → [B, T]"""
    flat = [logprob for sample in samples for logprob in sample.logprobs]
    return torch.zeros_like(mask_BT).masked_scatter(mask_BT.bool(), torch.tensor(flat, device=mask_BT.device))


def minibatches(sequences: Sequence[Scored], parts: int, order: torch.Generator) -> list[list[int]]:
    """A shuffled batch in up to `parts` pieces, none empty; a conversation's turns stay together."""
    together = threads(sequences)
    shuffled = torch.randperm(len(together), generator=order)
    pieces = shuffled.tensor_split(min(parts, len(together)))
    return [[index for thread in piece.tolist() for index in together[thread]] for piece in pieces]
