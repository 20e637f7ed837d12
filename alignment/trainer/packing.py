"""Sequences → micro-batches.

Turns of one conversation are one row: where a turn's tokens begin a later turn's prompt, the later row computes
both, and the earlier turn costs nothing. Rows of similar length lie in one rectangle, padded on the right. That
beats laying them end to end: such a row needs a dense attention mask, quadratic in the row, and was 1.4 (560
tokens) to 5 times (4,480 tokens) slower on a CPU, while the padding of sorted lengths costs a few per cent.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from alignment.model.policy import Rows
from alignment.samples import Sample


class Scored(NamedTuple):
    """A sequence whose tokens from `start` on are to be scored."""

    ids: tuple[int, ...]
    start: int
    temperature: float = 1.0

    @classmethod
    def of(cls, sample: Sample) -> "Scored":
        return cls(sample.prompt_ids + sample.output_ids, len(sample.prompt_ids), sample.temperature)


def threads(sequences: Sequence[Scored]) -> list[list[int]]:
    """Sequences that one row can hold, the longest first: the others are what it begins with.

    Example: the ids 1 2, 1 2 3 and 5 give [[2], [1, 0]]
    """
    # In this order a beginning comes right after all that continue it.
    order = sorted(range(len(sequences)), key=lambda index: sequences[index].ids, reverse=True)
    found: list[list[int]] = []
    for index in order:
        ids = sequences[index].ids
        if found and sequences[found[-1][0]].ids[: len(ids)] == ids:
            found[-1].append(index)
        else:
            found.append([index])
    return found


def plan(sequences: Sequence[Scored], budget: int, num_ranks: int = 1, *, together: Sequence[Sequence[int]] = (), packing: str = "tree") -> list[list[int]]:
    """Which sequences share a micro-batch, longest first, none wider than `budget` tokens unless it must be.

    The number of micro-batches is a multiple of `num_ranks`, because every forward is a meeting of all ranks;
    where there are too few sequences for that, some micro-batches are empty.
    Example: lengths of 3, 5, 4 and 2 with a budget of 8 give [[1], [2, 0], [3]]
    """

    def length(thread: list[int]) -> int:
        return len(sequences[thread[0]].ids)

    if together:
        return [list(range(len(sequences)))] + [[] for _ in range(num_ranks - 1)]
    groups: list[list[list[int]]] = []
    for thread in sorted(threads(sequences), key=length, reverse=True):
        if groups and length(groups[-1][0]) * (len(groups[-1]) + 1) <= budget:
            groups[-1].append(thread)
        else:
            groups.append([thread])
    while len(groups) % num_ranks:
        fullest = max(groups, key=len)
        half = len(fullest) // 2
        groups.append(fullest[len(fullest) - half :])
        del fullest[len(fullest) - half :]
    return [[index for thread in group for index in thread] for group in groups]


def rows(sequences: Sequence[Scored], device: torch.device) -> Rows:
    """One rectangle of token ids and the flat list of what is to be predicted, sequence by sequence."""
    held = threads(sequences)
    row_of = {index: row for row, thread in enumerate(held) for index in thread}
    heads = [sequences[thread[0]].ids for thread in held]
    ids = torch.zeros(len(heads), max(len(head) for head in heads), dtype=torch.long)
    for row, head in enumerate(heads):
        ids[row, : len(head)] = torch.tensor(head)
    counts = torch.tensor([len(sequence.ids) - sequence.start for sequence in sequences])
    row_N = torch.tensor([row_of[index] for index in range(len(sequences))]).repeat_interleave(counts)
    column_N = torch.cat([torch.arange(s.start - 1, len(s.ids) - 1) for s in sequences])
    temperature_N = torch.tensor([s.temperature for s in sequences]).repeat_interleave(counts)
    parts = (ids, row_N, column_N, ids[row_N, column_N + 1], temperature_N)
    return Rows(*(part.to(device) for part in parts))
