"""A batch laid out as tensors, and cut into the minibatches that are one optimizer step each."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from alignment.algorithms import MicroBatch, TrainData
from alignment.data.micro_batches import Scored, threads
from alignment.types import Sample


def output_mask(sequences: Sequence[Scored], device: torch.device) -> Tensor:
    """1 for every scored token, 0 for the padding behind.  → [B, T]"""
    counts = torch.tensor([len(sequence.ids) - sequence.start for sequence in sequences])
    return (torch.arange(int(counts.max())) < counts[:, None]).float().to(device)


def lay_out(samples: Sequence[Sample], device: torch.device) -> TrainData:
    """All that is known of a batch before anything is scored."""
    mask_BT = output_mask([Scored.of(sample) for sample in samples], device)
    flat = torch.tensor([logprob for sample in samples for logprob in sample.logprobs], device=device)
    return TrainData(
        samples=samples,
        mask_BT=mask_BT,
        rewards_B=torch.tensor([sample.reward for sample in samples], device=device),
        rollout_BT=torch.zeros_like(mask_BT).masked_scatter(mask_BT.bool(), flat),
    )


def minibatches(
    samples: Sequence[Sample], together: Iterable[Sequence[int]], parts: int, order: torch.Generator
) -> list[list[int]]:
    """A shuffled batch in up to `parts` pieces, none empty.

    What belongs together stays together: the turns of a conversation and the replies to one prompt, because they
    share their computation, and the sets in `together`, because their loss is one.
    """
    units = _units(samples, together)
    shuffled = torch.randperm(len(units), generator=order)
    pieces = shuffled.tensor_split(min(parts, len(units)))
    return [[index for unit in piece.tolist() for index in units[unit]] for piece in pieces]


def micro_batch(data: TrainData, minibatch: Sequence[int], rows: Sequence[int], scored_BT: Tensor) -> MicroBatch:
    """Some rows of a minibatch, with the minibatch's own counts to divide by."""
    return MicroBatch(
        whole=data,
        rows=tuple(rows),
        scored_BT=scored_BT,
        num_tokens=int(data.mask_BT[list(minibatch)].sum()),
        num_sequences=len(minibatch),
        minibatch=tuple(minibatch),
    )


def _units(samples: Sequence[Sample], together: Iterable[Sequence[int]]) -> list[list[int]]:
    """The connected parts of a batch, in order of their first samples."""
    leader = list(range(len(samples)))

    def find(index: int) -> int:
        while leader[index] != index:
            leader[index] = leader[leader[index]]
            index = leader[index]
        return index

    def join(indices: Sequence[int]) -> None:
        for other in indices[1:]:
            a, b = find(indices[0]), find(other)
            leader[max(a, b)] = min(a, b)

    named: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        for name in (sample.group and f"group {sample.group}", sample.conversation and f"of {sample.conversation}"):
            if name:
                named.setdefault(name, []).append(index)
    for indices in (*named.values(), *together, *threads([Scored.of(sample) for sample in samples])):
        join(indices)
    units: dict[int, list[int]] = {}
    for index in range(len(samples)):
        units.setdefault(find(index), []).append(index)
    return list(units.values())
