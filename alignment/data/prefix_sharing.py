"""Sequences that begin alike share a row: what they have in common is computed once.

Sorted, sequences that begin alike are neighbours, and a run of neighbours is a tree walked depth first: each sequence
branches off where it parts from the one before. A row is such a run, its tokens end to end. Turns that continue one
another are a tree without branches, a chain, which causal attention reads as it is; branches need a mask.

A row that branches is longer than each of its sequences, and attention is quadratic in the row; so the runs are cut
where that costs least (`cost`). Many candidates for a long prompt become one row, and conversations that have no more
than a system prompt in common stay apart.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import inf
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Packing = Literal["tree", "chain", "off"]
Ids = tuple[int, ...]

# Measured on a CPU with models of 2 M and 100 M weights, in rows of 128 to 2,048 tokens (docs/trainer-bench.md).
PAIRS_PER_TOKEN = 2048  # tokens that look at each other, in the time that one takes for all the rest
MASK = 1.05  # what a mask adds to a row's time besides: sharing less than that does not pay


class Row(NamedTuple):
    """Sequences that lie in one row, in its order, and the tokens that they take there together."""

    members: list[int]
    tokens: int
    branches: bool


def cost(tokens: int, branches: bool) -> float:
    """Of a row, in tokens. With a mask attention looks at all pairs of tokens; when causal, at half of them."""
    if branches:
        return MASK * tokens + tokens * tokens / PAIRS_PER_TOKEN
    return tokens + tokens * tokens / PAIRS_PER_TOKEN / 2


def common(one: Ids, other: Ids) -> int:
    """How many tokens two sequences begin with in common. Example: 1 2 3 and 1 2 4 give 2"""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))


def share(ids: Sequence[Ids], packing: Packing, longest: float = inf) -> list[Row]:
    """The rows that cost least together. None that branches has more than `longest` tokens.

    Example: 1 2 3 4, 1 2 3 5 and 1 2 are one row of five tokens
    """
    if packing == "off":
        return [Row([index], len(sequence), False) for index, sequence in enumerate(ids)]
    order = sorted(range(len(ids)), key=ids.__getitem__, reverse=True)  # a beginning comes after all that continue it
    shared = [0, *(common(ids[one], ids[other]) for one, other in pairwise(order))]
    costs, rows = [0.0], [Row([], 0, False)]  # of the first n sequences: their cost, and the row that the nth is in
    for end in range(1, len(order) + 1):
        best, last = inf, (0, 0, False)
        behind = 0  # tokens of the row behind its first sequence
        for begin in range(end - 1, -1, -1):
            length = len(ids[order[begin]])
            tokens, branches = length + behind, behind > 0
            if branches and (packing == "chain" or tokens > longest):
                break
            total = costs[begin] + cost(tokens, branches)
            if total < best:
                best, last = total, (begin, tokens, branches)
            if not shared[begin]:
                break
            behind += length - shared[begin]
        begin, tokens, branches = last
        costs.append(best)
        rows.append(Row(order[begin:end], tokens, branches))
    chosen: list[Row] = []
    end = len(order)
    while end:
        chosen.append(rows[end])
        end -= len(rows[end].members)
    return chosen[::-1]


def walk(ids: Iterable[Ids]) -> Iterator[tuple[Tensor, int]]:
    """A row's sequences, in its order: the columns that hold each one's tokens, and the row's tokens so far.

    Example: 1 2 3 4, 1 2 3 5 and 1 2 give 0 1 2 3 and 4, 0 1 2 4 and 5, 0 1 and 5
    """
    columns, before, tokens = torch.arange(0), Ids(), 0
    for sequence in ids:
        shared = common(before, sequence)
        before, new = sequence, len(sequence) - shared
        columns = torch.cat([columns[:shared], torch.arange(tokens, tokens + new)])
        tokens += new
        yield columns, tokens
