"""Connected components of things that share keys."""

from collections import defaultdict
from collections.abc import Collection, Hashable, Sequence


def connected_components(keys: Sequence[Collection[Hashable]]) -> list[list[int]]:
    """Group the indices of `keys`: two are in one group if they share a key, directly or through other indices.

    Groups are in the order of their first indices.
    Example: the keys [a], [b], [a, c] and [c] give [[0, 2, 3], [1]]
    """
    indices_of: dict[Hashable, list[int]] = defaultdict(list)
    for index, own_keys in enumerate(keys):
        for key in own_keys:
            indices_of[key].append(index)
    components: list[list[int]] = []
    visited: set[int] = set()
    for start in range(len(keys)):
        if start in visited:
            continue
        visited.add(start)
        component = [start]
        for index in component:  # the list grows meanwhile
            for key in keys[index]:
                neighbours = set(indices_of.pop(key, ())) - visited  # each key is followed once
                visited |= neighbours
                component += neighbours
        components.append(sorted(component))
    return components
