"""Collate a batch into tensors, and split it into minibatches of one optimizer step each."""

from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor

from alignment.data.components import connected_components
from alignment.data.micro_batches import ScoredSequence, prefix_chains
from alignment.types import Sample, TrainData


def output_mask(sequences: Sequence[ScoredSequence], device: torch.device) -> Tensor:
    """Return 1 for every scored token and 0 for the padding after them.  → [B, T] float32"""
    counts = torch.tensor([len(sequence.ids) - sequence.start for sequence in sequences])
    return (torch.arange(int(counts.max())) < counts[:, None]).float().to(device)


def collate(samples: Sequence[Sample], device: torch.device) -> TrainData:
    """Return a batch as tensors, before anything is scored. All tensors are float32 on `device`.

    Weights are relative: their mean is 1, so that the size of the loss does not depend on who gave the feedback.
    """
    mask_BT = output_mask([ScoredSequence.from_sample(sample) for sample in samples], device)
    flat = torch.tensor([logprob for sample in samples for logprob in sample.logprobs], device=device)
    weights_B = torch.tensor([sample.weight for sample in samples], device=device)
    return TrainData(
        samples=samples,
        response_mask_BT=mask_BT,
        rewards_B=torch.tensor([sample.reward for sample in samples], device=device),
        rollout_logprobs_BT=torch.zeros_like(mask_BT).masked_scatter(mask_BT.bool(), flat),
        weights_B=weights_B / weights_B.mean() if len({sample.weight for sample in samples}) > 1 else None,
    )


def split_minibatches(
    samples: Sequence[Sample],
    coupled_samples: Iterable[Sequence[int]],
    num_minibatches: int,
    generator: torch.Generator,
) -> list[list[int]]:
    """Shuffle a batch and split it into up to `num_minibatches` lists of sample indices, none empty.

    Samples are kept in one minibatch if they are turns of one conversation or replies to one prompt, because they share
    their computation, or if they are in one set of `coupled_samples`, because they share their loss.
    """
    units = _inseparable_units(samples, coupled_samples)
    shuffled = torch.randperm(len(units), generator=generator)
    pieces = shuffled.tensor_split(min(num_minibatches, len(units)))
    return [[index for unit in piece.tolist() for index in units[unit]] for piece in pieces]


def _inseparable_units(samples: Sequence[Sample], coupled_samples: Iterable[Sequence[int]]) -> list[list[int]]:
    """Return the connected components of a batch, in the order of their first samples."""
    keys: list[list[Hashable]] = [[] for _ in samples]
    for index, sample in enumerate(samples):
        if sample.group:
            keys[index].append(("group", sample.group))
        if sample.conversation:
            keys[index].append(("conversation", sample.conversation))
    chains = prefix_chains([ScoredSequence.from_sample(sample) for sample in samples])
    for number, indices in enumerate((*coupled_samples, *chains)):
        for index in indices:
            keys[index].append(number)
    return connected_components(keys)
