"""Sequences → micro-batches: rectangles of rows of similar length, padded on the right.

What shares a row is decided in `trees`; the default is "tree", with "chain" where a model takes no masks. Rows lie
side by side and not end to end: one long row needs attention over all pairs of all rows, which took twice the time
and more, while padding among sorted lengths is a few per cent (docs/trainer-bench.md). Rows that need a mask and rows
that need none are kept apart, so that the others stay with causal attention.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch

from alignment.data.prefix_sharing import Ids, Packing, Row, cost, share, walk
from alignment.models.policy_model import Rows
from alignment.types import Sample

Block = list[Row]  # rows that stay in one micro-batch


class Scored(NamedTuple):
    """A sequence whose tokens from `start` on are to be scored."""

    ids: Ids
    start: int
    temperature: float = 1.0

    @classmethod
    def of(cls, sample: Sample) -> "Scored":
        return cls(sample.prompt_ids + sample.output_ids, len(sample.prompt_ids), sample.temperature)


def threads(sequences: Sequence[Scored]) -> list[list[int]]:
    """Sequences that continue one another, the longest of each thread first.

    Example: the ids 1 2, 1 2 3 and 5 give [[2], [1, 0]]
    """
    return [row.members for row in share([sequence.ids for sequence in sequences], "chain")]


def plan(
    sequences: Sequence[Scored],
    budget: int,
    num_ranks: int = 1,
    *,
    together: Sequence[Sequence[int]] = (),
    packing: Packing = "tree",
) -> list[list[int]]:
    """Which sequences share a micro-batch, the costliest first, none larger than `budget` tokens unless it must be.

    Sequences that are named `together` are not parted. The number of micro-batches is a multiple of `num_ranks`,
    because every forward is a meeting of all ranks, and micro-batches that meet cost about the same. Where there are
    too few sequences for that, some micro-batches are empty.
    Example: lengths of 3, 5, 4 and 2 with a budget of 8 give [[1], [2, 0], [3]]
    """
    ids = [sequence.ids for sequence in sequences]
    rows = share(ids, packing, budget)
    while len(rows) < num_ranks and _branch(rows):  # a tree can be cut, so that no rank is idle
        rows = share(ids, packing, max(row.tokens for row in rows if row.branches) - 1)
    blocks = sorted(_blocks(rows, together), key=lambda block: (_branch(block), _width(block)), reverse=True)
    groups: list[list[Block]] = []
    for block in blocks:
        if groups and _branch(groups[-1][0]) == _branch(block) and _size([*chain(*groups[-1]), *block]) <= budget:
            groups[-1].append(block)
        else:
            groups.append([block])

    def laid(group: list[Block]) -> list[Row]:
        """What `rows` makes of it: trees that were parted may meet again."""
        return share([ids[index] for index in _members(group)], packing)

    while large := [group for group in groups if len(group) > 1 and _size(laid(group)) > budget]:
        groups.append(_halve(large[0]))
    while len(groups) % num_ranks:
        groups.append(_halve(max(groups, key=lambda group: _expense(group) * (len(group) > 1))))
    return [_members(group) for group in sorted(groups, key=_expense, reverse=True)]


def rows(sequences: Sequence[Scored], device: torch.device, packing: Packing = "tree") -> Rows:
    """One rectangle of token ids and the flat list of what is to be predicted, sequence by sequence."""
    held = share([sequence.ids for sequence in sequences], packing)
    shape = len(held), _width(held)
    ids_BT, positions_BT = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    # The last column that sees a token: depth first, those that do lie side by side. Padding sees itself.
    seen_BT = torch.arange(shape[1]).repeat(shape[0], 1)
    places = [(0, torch.arange(0))] * len(sequences)
    for number, row in enumerate(held):
        walked = walk(sequences[index].ids for index in row.members)
        for index, (columns, tokens) in zip(row.members, walked, strict=True):
            ids_BT[number, columns] = torch.tensor(sequences[index].ids)
            positions_BT[number, columns] = torch.arange(len(columns))
            seen_BT[number, columns] = tokens - 1
            places[index] = number, columns
    counts = torch.tensor([len(sequence.ids) - sequence.start for sequence in sequences])
    flat = (
        ids_BT,
        torch.tensor([number for number, _ in places]).repeat_interleave(counts),
        torch.cat([columns[one.start - 1 : -1] for one, (_, columns) in zip(sequences, places, strict=True)]),
        torch.cat([torch.tensor(one.ids[one.start :], dtype=torch.long) for one in sequences]),
        torch.tensor([one.temperature for one in sequences]).repeat_interleave(counts),
    )
    laid = Rows(*(part.to(device) for part in flat))
    if not _branch(held):
        return laid
    row_T = torch.arange(shape[1], device=device)[:, None]
    mask_BTT = (row_T >= row_T.T) & (row_T <= seen_BT.to(device)[:, None, :])
    return laid._replace(mask=mask_BTT[:, None], positions_BT=positions_BT.to(device))


def _blocks(rows: Sequence[Row], together: Sequence[Sequence[int]]) -> list[Block]:
    """Rows, joined where sequences of theirs are to stay together."""
    block_of = {index: block for block in ([row] for row in rows) for index in block[0].members}
    for indices in together:
        for index in indices:
            one, other = block_of[indices[0]], block_of[index]
            if one is not other:
                one += other
                block_of |= {member: one for row in other for member in row.members}
    return list({id(block): block for block in block_of.values()}.values())


def _halve(group: list[Block]) -> list[Block]:
    """Take half of the group away, and return it."""
    half = group[(len(group) + 1) // 2 :]
    del group[(len(group) + 1) // 2 :]
    return half


def _members(group: list[Block]) -> list[int]:
    return [index for block in group for row in block for index in row.members]


def _branch(rows: Sequence[Row]) -> bool:
    return any(row.branches for row in rows)


def _width(rows: Sequence[Row]) -> int:
    return max((row.tokens for row in rows), default=0)


def _size(rows: Sequence[Row]) -> int:
    return len(rows) * _width(rows)


def _expense(group: list[Block]) -> float:
    rows = list(chain(*group))
    return len(rows) * cost(_width(rows), _branch(rows))
