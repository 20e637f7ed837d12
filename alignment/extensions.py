"""Load functions and classes of other packages: by entry point, or by import path where that is allowed."""

from collections.abc import Callable, Collection
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from alignment.errors import UnknownExtension


def extension_names(group: str, builtins: Collection[str]) -> list[str]:
    """Return the sorted names that are built in or entry points of the group."""
    return sorted({*builtins, *(point.name for point in entry_points(group=group))})


def nearest_name(name: str, known: Collection[str]) -> str | None:
    """Return the known name that was probably meant, whatever its case and its hyphens; None if none is near.

    Example: nearest_name("DR-GRPO", ["grpo", "dr_grpo"]) is "dr_grpo"
    """
    by_key = {_comparable(each): each for each in known}
    matches = get_close_matches(_comparable(name), by_key, n=1)
    return by_key[matches[0]] if matches else None


def _comparable(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_")


def describe_unknown(name: str, known: Collection[str], noun: str) -> str:
    """Return a sentence, without its period, about a name that is not known: the nearest one, and all.

    Example: describe_unknown("grppo", ["dpo", "grpo"], "algorithm") is "there is no algorithm 'grppo'; did you mean
             'grpo'? Known are dpo, grpo"
    """
    near, listed = nearest_name(name, known), ", ".join(known)
    hint = (
        f"did you mean {near!r}? Known are {listed}"
        if near
        else f"known are {listed}"
        if known
        else "none is installed"
    )
    return f"there is no {noun} {name!r}; {hint}"


def load_extension(
    name: str, group: str, builtins: Collection[str], *, noun: str, allow_dotted_path: bool = False
) -> object:
    """Load the object of `module:attribute`, or of an entry point of the group. Raises UnknownExtension.

    With `allow_dotted_path`, `module.attribute` works too, where no entry point has that name. `noun` is used in error
    messages. The import of a module may raise any exception.
    """
    if ":" in name or (allow_dotted_path and "." in name and not entry_points(group=group, name=name)):
        module, _, attribute = name.rpartition(":" if ":" in name else ".")
        try:
            return getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            near = nearest_name(name, extension_names(group, builtins))
            hint = f" (did you mean {near!r}?)" if near else ""
            raise UnknownExtension(f"{name!r} cannot be imported: {error}{hint}") from error
    points = entry_points(group=group, name=name)
    if not points:
        sentence = describe_unknown(name, extension_names(group, builtins), noun)
        raise UnknownExtension(f"{sentence[0].upper()}{sentence[1:]}.")
    return next(iter(points)).load()


def load_function(name: str, group: str, builtins: Collection[str], *, noun: str) -> Callable[..., Any]:
    """Load a function with `load_extension`. Raises UnknownExtension, also for an object that is not callable."""
    function = load_extension(name, group, builtins, noun=noun)
    if not callable(function):
        raise UnknownExtension(f"{name!r} is {function!r}, which is not a function.")
    loaded: Callable[..., Any] = function
    return loaded
