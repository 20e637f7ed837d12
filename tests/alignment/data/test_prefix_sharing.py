"""What begins alike shares a row where that costs least, and nothing is computed twice in a row."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment.data.prefix_sharing import Ids, Row, common, cost, share, walk

TRIES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple), min_size=1, max_size=12)


def beginnings(ids: list[Ids]) -> set[Ids]:
    return {sequence[:length] for sequence in ids for length in range(1, len(sequence) + 1)}


def total(rows: list[Row]) -> float:
    return sum(cost(row.tokens, row.branches) for row in rows)


def test_a_group_its_prompt_and_a_stranger_by_hand() -> None:
    ids = [(1, 2, 3, 4), (1, 2), (7, 8), (1, 2, 3, 5)]
    assert share(ids, "tree") == [Row([2], 2, False), Row([3, 0, 1], 5, True)]
    assert share(ids, "chain") == [Row([2], 2, False), Row([3], 4, False), Row([0, 1], 4, False)]
    assert share(ids, "off") == [Row([0], 4, False), Row([1], 2, False), Row([2], 2, False), Row([3], 4, False)]


def test_each_sequence_knows_its_columns() -> None:
    walked = [(columns.tolist(), tokens) for columns, tokens in walk([(1, 2, 3, 5), (1, 2, 3, 4), (1, 2)])]
    assert walked == [([0, 1, 2, 3], 4), ([0, 1, 2, 4], 5), ([0, 1], 5)]


def test_a_long_prompt_is_shared_and_a_short_one_is_not() -> None:
    def candidates(prompt: int, completion: int) -> list[Ids]:
        return [(*range(1, prompt + 1), 1000 + index, *range(completion - 1)) for index in range(8)]

    assert [row.tokens for row in share(candidates(prompt=200, completion=60), "tree")] == [200 + 8 * 60]
    assert [row.tokens for row in share(candidates(prompt=5, completion=400), "tree")] == [405] * 8


def test_a_mask_costs_something_and_twice_the_attention() -> None:
    assert cost(2048, branches=False) == 2048 + 1024
    assert cost(2048, branches=True) == pytest.approx(1.05 * 2048 + 2048)


def test_a_few_tokens_in_common_are_not_worth_a_mask() -> None:
    def two(shared: int) -> list[Ids]:
        return [(*range(1, shared + 1), *range(1000 * end, 1000 * end + 100 - shared)) for end in (1, 2)]

    assert len(share(two(shared=10), "tree")) == 2
    assert len(share(two(shared=30), "tree")) == 1


@settings(deadline=None)
@given(TRIES)
def test_a_tree_row_holds_every_beginning_once(ids: list[Ids]) -> None:
    rows = share(ids, "tree")
    assert sorted(index for row in rows for index in row.members) == list(range(len(ids)))
    for row in rows:
        held = [ids[index] for index in row.members]
        assert row.tokens == len(beginnings(held))
        assert row.branches == any(common(one, other) < len(other) for one, other in pairwise(held))


@settings(deadline=None)
@given(TRIES, st.integers(1, 12))
def test_no_row_that_branches_is_longer_than_it_may_be(ids: list[Ids], longest: int) -> None:
    assert all(row.tokens <= longest for row in share(ids, "tree", longest) if row.branches)


@settings(deadline=None)
@given(TRIES)
def test_no_other_cut_of_the_sorted_sequences_costs_less(ids: list[Ids]) -> None:
    order = sorted(range(len(ids)), key=ids.__getitem__, reverse=True)

    def cheapest(begin: int) -> float:
        if begin == len(order):
            return 0.0
        found = []
        for end in range(begin + 1, len(order) + 1):
            held = [ids[index] for index in order[begin:end]]
            if len(held) > 1 and not common(held[-2], held[-1]):
                break
            branches = any(common(one, other) < len(other) for one, other in pairwise(held))
            found.append(cost(len(beginnings(held)), branches) + known[end])
        return min(found)

    known = [0.0] * (len(order) + 1)
    for begin in range(len(order) - 1, -1, -1):
        known[begin] = cheapest(begin)
    assert total(share(ids, "tree")) == pytest.approx(known[0])


@settings(deadline=None)
@given(TRIES)
def test_in_chains_no_row_begins_another(ids: list[Ids]) -> None:
    rows = share(ids, "chain")
    heads = [ids[row.members[0]] for row in rows]
    assert all(ids[index] == ids[row.members[0]][: len(ids[index])] for row in rows for index in row.members)
    assert not any(a != b and b[: len(a)] == a for a in heads for b in heads)
    assert len(set(heads)) == len(heads)
