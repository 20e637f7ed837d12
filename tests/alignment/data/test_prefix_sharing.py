"""Sequences with a common prefix share a row if that is cheapest, and each row contains a prefix once only."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment.data.prefix_sharing import (
    PackedRow,
    TokenIds,
    common_prefix_length,
    estimate_cost,
    pack_rows,
    row_columns,
)

TRIES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple), min_size=1, max_size=12)


def prefixes(ids: list[TokenIds]) -> set[TokenIds]:
    return {sequence[:length] for sequence in ids for length in range(1, len(sequence) + 1)}


def total(rows: list[PackedRow]) -> float:
    return sum(estimate_cost(row.tokens, row.branches) for row in rows)


def test_pack_rows_example() -> None:
    ids = [(1, 2, 3, 4), (1, 2), (7, 8), (1, 2, 3, 5)]
    assert pack_rows(ids, "tree") == [PackedRow([2], 2, False), PackedRow([3, 0, 1], 5, True)]
    assert pack_rows(ids, "chain") == [PackedRow([2], 2, False), PackedRow([3], 4, False), PackedRow([0, 1], 4, False)]
    assert pack_rows(ids, "off") == [
        PackedRow([0], 4, False),
        PackedRow([1], 2, False),
        PackedRow([2], 2, False),
        PackedRow([3], 4, False),
    ]


def test_row_columns_example() -> None:
    layout = [(columns.tolist(), tokens) for columns, tokens in row_columns([(1, 2, 3, 5), (1, 2, 3, 4), (1, 2)])]
    assert layout == [([0, 1, 2, 3], 4), ([0, 1, 2, 4], 5), ([0, 1], 5)]


def test_long_prompt_is_shared_and_short_prompt_is_not() -> None:
    def candidates(prompt: int, completion: int) -> list[TokenIds]:
        return [(*range(1, prompt + 1), 1000 + index, *range(completion - 1)) for index in range(8)]

    assert [row.tokens for row in pack_rows(candidates(prompt=200, completion=60), "tree")] == [200 + 8 * 60]
    assert [row.tokens for row in pack_rows(candidates(prompt=5, completion=400), "tree")] == [405] * 8


def test_explicit_mask_costs_overhead_and_twice_the_attention() -> None:
    assert estimate_cost(2048, branches=False) == 2048 + 1024
    assert estimate_cost(2048, branches=True) == pytest.approx(1.05 * 2048 + 2048)


def test_short_common_prefix_does_not_justify_a_mask() -> None:
    def sequence_pair(shared: int) -> list[TokenIds]:
        return [(*range(1, shared + 1), *range(1000 * end, 1000 * end + 100 - shared)) for end in (1, 2)]

    assert len(pack_rows(sequence_pair(shared=10), "tree")) == 2
    assert len(pack_rows(sequence_pair(shared=30), "tree")) == 1


@settings(deadline=None)
@given(TRIES)
def test_tree_row_contains_every_prefix_once(ids: list[TokenIds]) -> None:
    rows = pack_rows(ids, "tree")
    assert sorted(index for row in rows for index in row.members) == list(range(len(ids)))
    for row in rows:
        members = [ids[index] for index in row.members]
        assert row.tokens == len(prefixes(members))
        assert row.branches == any(common_prefix_length(one, other) < len(other) for one, other in pairwise(members))


@settings(deadline=None)
@given(TRIES, st.integers(1, 12))
def test_rows_with_branches_respect_max_tokens(ids: list[TokenIds], longest: int) -> None:
    assert all(row.tokens <= longest for row in pack_rows(ids, "tree", longest) if row.branches)


@settings(deadline=None)
@given(TRIES)
def test_packing_has_minimal_cost(ids: list[TokenIds]) -> None:
    order = sorted(range(len(ids)), key=ids.__getitem__, reverse=True)

    def cheapest(begin: int) -> float:
        if begin == len(order):
            return 0.0
        actual = []
        for end in range(begin + 1, len(order) + 1):
            members = [ids[index] for index in order[begin:end]]
            if len(members) > 1 and not common_prefix_length(members[-2], members[-1]):
                break
            branches = any(common_prefix_length(one, other) < len(other) for one, other in pairwise(members))
            actual.append(estimate_cost(len(prefixes(members)), branches) + min_costs[end])
        return min(actual)

    min_costs = [0.0] * (len(order) + 1)
    for begin in range(len(order) - 1, -1, -1):
        min_costs[begin] = cheapest(begin)
    assert total(pack_rows(ids, "tree")) == pytest.approx(min_costs[0])


@settings(deadline=None)
@given(TRIES)
def test_chain_packing_leaves_no_row_that_is_a_prefix_of_another(ids: list[TokenIds]) -> None:
    rows = pack_rows(ids, "chain")
    longest_sequences = [ids[row.members[0]] for row in rows]
    assert all(ids[index] == ids[row.members[0]][: len(ids[index])] for row in rows for index in row.members)
    assert not any(a != b and b[: len(a)] == a for a in longest_sequences for b in longest_sequences)
    assert len(set(longest_sequences)) == len(longest_sequences)
