"""Python values as JSON, so that values of a sandbox can be compared outside of it."""

from collections.abc import Mapping, Sequence, Set
from typing import Any

PlainValue = str | int | float | bool | None | Sequence["PlainValue"] | Mapping["PlainValue", "PlainValue"] | Set[Any]


def encode_value(value: object) -> object:  # its source is run by Monty, too, which knows no hints of ours
    """Return the value as lists with the name of its type first. What is no plain value becomes ["other"].

    Example: (1, {"a": 2.0}) -> ["tuple", 1, ["dict", ["a", 2.0]]]
    """
    if value is None or isinstance(value, (bool, str, int)):
        return value
    if isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            return ["float", str(value)]
        return value
    if isinstance(value, (list, tuple)):
        return ["list" if isinstance(value, list) else "tuple"] + [encode_value(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return ["set", *sorted([encode_value(item) for item in value], key=str)]
    if isinstance(value, dict):
        return ["dict", *sorted([[encode_value(key), encode_value(item)] for key, item in value.items()], key=str)]
    return ["other"]


def is_plain(value: object) -> bool:
    """Return whether the value can be encoded whole: text, numbers, None, and collections of them."""
    if isinstance(value, Mapping):
        return isinstance(value, dict) and all(is_plain(key) and is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(is_plain, value))
    return value is None or isinstance(value, (str, int, float))
