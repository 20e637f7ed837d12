"""Load functions and classes of other packages: by entry point, or by import path where that is allowed."""

from collections.abc import Callable, Collection
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from alignment.errors import UnknownExtension


def extension_names(group: str, builtins: Collection[str]) -> list[str]:
    """Return the sorted names that are built in or entry points of the group."""
    return sorted({*builtins, *(point.name for point in entry_points(group=group))})


def load_extension(
    name: str, group: str, builtins: Collection[str], *, noun: str, allow_dotted_path: bool = False
) -> Any:
    """Load the object of `module:attribute`, or of an entry point of the group. Raises UnknownExtension.

    With `allow_dotted_path`, `module.attribute` works too, where no entry point has that name. `noun` is used in error
    messages. The import of a module may raise any exception.
    """
    if ":" in name or (allow_dotted_path and "." in name and not entry_points(group=group, name=name)):
        module, _, attribute = name.rpartition(":" if ":" in name else ".")
        try:
            return getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise UnknownExtension(f"{name!r} cannot be imported: {error}") from error
    points = entry_points(group=group, name=name)
    if not points:
        known = ", ".join(extension_names(group, builtins))
        raise UnknownExtension(f"There is no {noun} {name!r}; known are {known}.")
    return next(iter(points)).load()


def load_function(name: str, group: str, builtins: Collection[str], *, noun: str) -> Callable[..., Any]:
    """Load a function with `load_extension`. Raises UnknownExtension, also for an object that is not callable."""
    function = load_extension(name, group, builtins, noun=noun)
    if not callable(function):
        raise UnknownExtension(f"{name!r} is {function!r}, which is not a function.")
    loaded: Callable[..., Any] = function
    return loaded
