"""Disjoint sets: unions by elements and by keys."""

from alignment.disjoint_set import DisjointSet


def test_union_merges_sets_under_the_smallest_element() -> None:
    sets = DisjointSet(5)
    sets.union([3, 4])
    sets.union([4, 1])
    assert [sets.find(index) for index in range(5)] == [0, 1, 2, 1, 1]


def test_elements_with_a_common_key_are_in_one_set() -> None:
    sets = DisjointSet(4)
    sets.union_by_key(2, ("prompt", "a"))
    sets.union_by_key(0, ("prompt", "b"))
    sets.union_by_key(3, ("prompt", "a"))
    assert [sets.find(index) for index in range(4)] == [0, 1, 2, 2]
