"""Micro-batches: rectangles of rows of similar length, padded on the right.

`prefix_sharing` decides which sequences share a row; the default is "tree", and "chain" for models that support no
explicit attention mask. Rows are padded side by side, not concatenated: one long row needs attention over all pairs of
all rows, which took more than twice the time, while padding among sorted lengths is a few per cent
(docs/trainer-bench.md). Rows that need a mask are kept apart from rows that need none, so that the latter keep causal
attention.

Tensor suffixes: B rows, T tokens of a row, N scored tokens of all rows.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch

from alignment.config.trainer import Packing
from alignment.data.prefix_sharing import PackedRow, TokenIds, estimate_cost, pack_rows, row_columns
from alignment.models.base_model import ModelInputs
from alignment.types import Sample

Block = list[PackedRow]  # rows that stay in one micro-batch


class ScoredSequence(NamedTuple):
    """A token sequence whose tokens from index `start` on are scored, at a sampling temperature."""

    ids: TokenIds
    start: int
    temperature: float = 1.0

    @classmethod
    def from_sample(cls, sample: Sample) -> "ScoredSequence":
        """Return the sample's prompt and output, of which the output is scored."""
        return cls(sample.prompt_ids + sample.output_ids, len(sample.prompt_ids), sample.temperature)


def prefix_chains(sequences: Sequence[ScoredSequence]) -> list[list[int]]:
    """Return lists of the indices of sequences that continue each other, the longest of each chain first.

    Example: the ids 1 2, 1 2 3 and 5 give [[2], [1, 0]]
    """
    return [row.members for row in pack_rows([sequence.ids for sequence in sequences], "chain")]


def make_micro_batches(
    sequences: Sequence[ScoredSequence],
    max_tokens: int,
    num_ranks: int = 1,
    *,
    coupled: Sequence[Sequence[int]] = (),
    packing: Packing = "tree",
) -> list[list[int]]:
    """Return lists of the indices of the sequences of each micro-batch, the costliest first.

    A micro-batch has at most `max_tokens` tokens, padding included, unless one row or coupled rows need more. The
    sequences of one set of `coupled` stay in one micro-batch. The number of micro-batches is a multiple of `num_ranks`,
    because all ranks take part in every forward pass, and micro-batches that run at the same time cost about the same.
    If there are too few sequences for that, some micro-batches are empty.
    Example: lengths of 3, 5, 4 and 2 with max_tokens=8 give [[1], [2, 0], [3]]
    """
    ids = [sequence.ids for sequence in sequences]
    rows = pack_rows(ids, packing, max_tokens)
    while len(rows) < num_ranks and _has_branches(rows):  # split a tree so that no rank is idle
        rows = pack_rows(ids, packing, max(row.tokens for row in rows if row.branches) - 1)
    blocks = sorted(_blocks(rows, coupled), key=lambda block: (_has_branches(block), _width(block)), reverse=True)
    groups: list[list[Block]] = []
    for block in blocks:
        same_attention = groups and _has_branches(groups[-1][0]) == _has_branches(block)
        if same_attention and _num_tokens([*chain(*groups[-1]), *block]) <= max_tokens:
            groups[-1].append(block)
        else:
            groups.append([block])

    def repack(group: list[Block]) -> list[PackedRow]:
        """Return the rows that `make_model_inputs` will make of the group: trees that were split may join again."""
        return pack_rows([ids[index] for index in _members(group)], packing)

    while oversized := [group for group in groups if len(group) > 1 and _num_tokens(repack(group)) > max_tokens]:
        groups.append(_split_half(oversized[0]))
    while len(groups) % num_ranks:
        groups.append(_split_half(max(groups, key=lambda group: _group_cost(group) * (len(group) > 1))))
    return [_members(group) for group in sorted(groups, key=_group_cost, reverse=True)]


def make_model_inputs(
    sequences: Sequence[ScoredSequence], device: torch.device, packing: Packing = "tree"
) -> ModelInputs:
    """Return one micro-batch as a [B, T] rectangle of token ids and the N tokens to score, sequence by sequence."""
    packed_rows = pack_rows([sequence.ids for sequence in sequences], packing)
    shape = len(packed_rows), _width(packed_rows)
    ids_BT, positions_BT = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    # The last column that attends to a token: in depth-first order those columns are contiguous. Padding attends to
    # itself.
    last_query_BT = torch.arange(shape[1]).repeat(shape[0], 1)
    row_and_columns = [(0, torch.arange(0))] * len(sequences)
    for row_index, row in enumerate(packed_rows):
        layout = row_columns(sequences[index].ids for index in row.members)
        for index, (columns, tokens) in zip(row.members, layout, strict=True):
            ids_BT[row_index, columns] = torch.tensor(sequences[index].ids)
            positions_BT[row_index, columns] = torch.arange(len(columns))
            last_query_BT[row_index, columns] = tokens - 1
            row_and_columns[index] = row_index, columns
    counts = torch.tensor([len(sequence.ids) - sequence.start for sequence in sequences])
    tensors = (
        ids_BT,
        torch.tensor([row_index for row_index, _ in row_and_columns]).repeat_interleave(counts),
        torch.cat(
            [
                columns[sequence.start - 1 : -1]
                for sequence, (_, columns) in zip(sequences, row_and_columns, strict=True)
            ]
        ),
        torch.cat([torch.tensor(sequence.ids[sequence.start :], dtype=torch.long) for sequence in sequences]),
        torch.tensor([sequence.temperature for sequence in sequences]).repeat_interleave(counts),
    )
    inputs = ModelInputs(*(tensor.to(device) for tensor in tensors))
    if not _has_branches(packed_rows):
        return inputs
    query_T1 = torch.arange(shape[1], device=device)[:, None]
    mask_BTT = (query_T1 >= query_T1.T) & (query_T1 <= last_query_BT.to(device)[:, None, :])
    return inputs._replace(attention_mask=mask_BTT[:, None], position_ids_BT=positions_BT.to(device))


def _blocks(rows: Sequence[PackedRow], coupled: Sequence[Sequence[int]]) -> list[Block]:
    """Return the rows, merged into blocks where their sequences are coupled."""
    block_of = {index: block for block in ([row] for row in rows) for index in block[0].members}
    for indices in coupled:
        for index in indices:
            block, other = block_of[indices[0]], block_of[index]
            if block is not other:
                block += other
                block_of |= {member: block for row in other for member in row.members}
    return list({id(block): block for block in block_of.values()}.values())


def _split_half(group: list[Block]) -> list[Block]:
    """Remove the second half of the group, in place, and return it."""
    half = group[(len(group) + 1) // 2 :]
    del group[(len(group) + 1) // 2 :]
    return half


def _members(group: list[Block]) -> list[int]:
    return [index for block in group for row in block for index in row.members]


def _has_branches(rows: Sequence[PackedRow]) -> bool:
    return any(row.branches for row in rows)


def _width(rows: Sequence[PackedRow]) -> int:
    return max((row.tokens for row in rows), default=0)


def _num_tokens(rows: Sequence[PackedRow]) -> int:
    """Return the tokens of the padded rectangle."""
    return len(rows) * _width(rows)


def _group_cost(group: list[Block]) -> float:
    rows = list(chain(*group))
    return len(rows) * estimate_cost(_width(rows), _has_branches(rows))
