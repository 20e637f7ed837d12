"""Prefix sharing: sequences with a common prefix share a row, so that the prefix is computed once.

After sorting, sequences with a common prefix are neighbours, and a run of neighbours is a prefix tree in depth-first
order: each sequence branches off where it differs from the previous one. A row is such a run, its new tokens
concatenated. Turns that continue each other are a tree without branches, a chain, for which causal attention is right;
branches need an explicit attention mask.

A row with branches is longer than each of its sequences, and attention is quadratic in the row, so the runs are cut
where that costs least (`estimate_cost`). Many candidates for a long prompt become one row, while conversations that
share no more than a system prompt stay apart.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, count, pairwise
from math import inf
from operator import ne
from typing import NamedTuple

import torch
from torch import Tensor

from alignment.config.trainer import Packing

TokenIds = tuple[int, ...]

# Measured on a CPU with models of 2 M and 100 M weights, in rows of 128 to 2,048 tokens (docs/trainer-bench.md).
PAIRS_PER_TOKEN = 2048  # pairs of tokens whose attention takes as long as all other computation for one token
MASK_OVERHEAD = 1.05  # factor that an explicit mask adds to a row's time; sharing fewer tokens than that does not pay


class PackedRow(NamedTuple):
    """The sequences of one row, in the row's order, and the number of tokens that they take there together."""

    members: list[int]  # indices of sequences
    tokens: int
    branches: bool


def estimate_cost(tokens: int, branches: bool) -> float:
    """Return the time of a row, in units of one token's time without attention.

    With a mask attention is computed for all pairs of tokens, with causal attention for half of them.
    """
    if branches:
        return MASK_OVERHEAD * tokens + tokens * tokens / PAIRS_PER_TOKEN
    return tokens + tokens * tokens / PAIRS_PER_TOKEN / 2


def common_prefix_length(first: TokenIds, second: TokenIds) -> int:
    """Return how many leading tokens two sequences have in common. Example: 1 2 3 and 1 2 4 give 2"""
    return next(compress(count(), map(ne, first, second)), min(len(first), len(second)))


def pack_rows(ids: Sequence[TokenIds], packing: Packing, max_tokens: float = inf) -> list[PackedRow]:
    """Return the rows with the least total cost (dynamic programming). A row with branches has at most `max_tokens`.

    "chain" shares a row only among sequences that continue each other; "off" gives each sequence a row.
    Example: 1 2 3 4, 1 2 3 5 and 1 2 are one row of five tokens
    """
    if packing == "off":
        return [PackedRow([index], len(sequence), False) for index, sequence in enumerate(ids)]
    order = sorted(range(len(ids)), key=ids.__getitem__, reverse=True)  # a prefix comes after its continuations
    shared = [0, *(common_prefix_length(ids[first], ids[second]) for first, second in pairwise(order))]
    # For the first n sequences: the least cost, and the row that the nth sequence is in.
    costs, rows = [0.0], [PackedRow([], 0, False)]
    for end in range(1, len(order) + 1):
        best, best_row = inf, (0, 0, False)
        tokens_after_first = 0  # tokens of the row after its first sequence
        for begin in range(end - 1, -1, -1):
            length = len(ids[order[begin]])
            tokens, branches = length + tokens_after_first, tokens_after_first > 0
            if branches and (packing == "chain" or tokens > max_tokens):
                break
            total = costs[begin] + estimate_cost(tokens, branches)
            if total < best:
                best, best_row = total, (begin, tokens, branches)
            if not shared[begin]:
                break
            tokens_after_first += length - shared[begin]
        begin, tokens, branches = best_row
        costs.append(best)
        rows.append(PackedRow(order[begin:end], tokens, branches))
    chosen: list[PackedRow] = []
    end = len(order)
    while end:
        chosen.append(rows[end])
        end -= len(rows[end].members)
    return chosen[::-1]


def row_columns(ids: Iterable[TokenIds]) -> Iterator[tuple[Tensor, int]]:
    """Yield, for each sequence of a row, the columns of its tokens and the row's number of tokens so far.

    Example: 1 2 3 4, 1 2 3 5 and 1 2 give 0 1 2 3 and 4, 0 1 2 4 and 5, 0 1 and 5
    """
    columns, previous, tokens = torch.arange(0), TokenIds(), 0
    for sequence in ids:
        shared = common_prefix_length(previous, sequence)
        previous, new = sequence, len(sequence) - shared
        columns = torch.cat([columns[:shared], torch.arange(tokens, tokens + new)])
        tokens += new
        yield columns, tokens
