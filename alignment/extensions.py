"""Functions of one's own: an entry point of a group, or `module:function` where that is allowed."""

from collections.abc import Callable, Collection
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from alignment.errors import AlignmentError


class UnknownFunction(AlignmentError):
    """Neither one of ours, nor an entry point, nor a function that may be imported."""


def names(group: str, ours: Collection[str]) -> list[str]:
    return sorted({*ours, *(point.name for point in entry_points(group=group))})


def load(name: str, group: str, ours: Collection[str], *, noun: str) -> Callable[..., Any]:
    """`module:function`, or an entry point's. Raises UnknownFunction. Importing may raise anything."""
    found: Any
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            found = getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise UnknownFunction(f"{name!r} cannot be imported: {error}") from error
    else:
        points = entry_points(group=group, name=name)
        if not points:
            raise UnknownFunction(f"There is no {noun} {name!r}; known are {', '.join(names(group, ours))}.")
        found = next(iter(points)).load()
    if not callable(found):
        raise UnknownFunction(f"{name!r} is {found!r}, which is no function.")
    function: Callable[..., Any] = found
    return function
