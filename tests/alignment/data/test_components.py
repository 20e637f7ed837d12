"""Connected components: indices that share keys, directly or through others."""

from alignment.data.components import connected_components


def test_shared_keys_connect_indices_through_others() -> None:
    assert connected_components([[], [4], [], [3], [3, 4]]) == [[0], [1, 3, 4], [2]]


def test_keys_are_equal_only_if_all_their_parts_are_equal() -> None:
    keys = [[("prompt", "b")], [], [("prompt", "a")], [("prompt", "a"), ("conversation", "b")]]
    assert connected_components(keys) == [[0], [1], [2, 3]]
