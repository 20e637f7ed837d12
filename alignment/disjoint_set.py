"""Disjoint sets (union-find) of the integers 0 … count − 1."""

from collections.abc import Hashable, Sequence


class DisjointSet:
    """The smallest element of a set is its root."""

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))
        self._first_of_key: dict[Hashable, int] = {}

    def find(self, index: int) -> int:
        """Return the root of the set that holds `index`."""
        while self._parent[index] != index:
            self._parent[index] = self._parent[self._parent[index]]
            index = self._parent[index]
        return index

    def union(self, indices: Sequence[int]) -> None:
        """Merge the sets that hold these elements."""
        for other in indices[1:]:
            a, b = self.find(indices[0]), self.find(other)
            self._parent[max(a, b)] = min(a, b)

    def union_by_key(self, index: int, key: Hashable) -> None:
        """Merge the set of `index` with the sets of all elements that were given the same key before."""
        self.union([self._first_of_key.setdefault(key, index), index])
