"""Open an environment by its name: an entry point, `module:Class`, or a scheme such as `textarena:NAME`."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import cast

from alignment.environments.episode_loop import LoopEnvironment
from alignment.environments.foreign import PACKAGES, open_foreign
from alignment.environments.foreign_http import open_http
from alignment.environments.foreign_openenv import open_openenv
from alignment.environments.host_process import HostConfig
from alignment.environments.protocols import ENTRY_POINT_GROUP, Environment, Interaction, Steps
from alignment.environments.tools.base import JsonObject
from alignment.environments.worlds import InteractionWorld, StepsWorld
from alignment.errors import AlignmentError
from alignment.extensions import extension_names, load_extension

Opener = Callable[[str, JsonObject, HostConfig | None], Environment]
# What is before the colon of a name, and what opens the rest of it with the environment's arguments.
SCHEMES: dict[str, Opener] = {
    **{scheme: partial(open_foreign, scheme) for scheme in PACKAGES},
    **{scheme: partial(open_http, scheme) for scheme in ("http", "https")},
    "openenv": open_openenv,
}


class NoEnvironment(AlignmentError):
    """What a name leads to is no environment, or does not take the arguments."""


def environment_names() -> list[str]:
    """Return what can be opened by name: the entry points, and the schemes, each with a colon."""
    return [*extension_names(ENTRY_POINT_GROUP, ()), *(f"{scheme}:" for scheme in sorted(SCHEMES))]


def open_environment(name: str, arguments: JsonObject | None = None, host: HostConfig | None = None) -> Environment:
    """Return the environment of this name, made with these keyword arguments.

    `host` says how environments of others are run, which schemes need. A Steps or an Interaction becomes an environment
    whose loop is ours. Raises UnknownExtension, NoEnvironment and UnavailableEnvironment; the import of a module, and
    the environment itself, may raise anything.
    """
    scheme, _, rest = name.partition(":")
    if scheme in SCHEMES:
        return SCHEMES[scheme](rest, arguments or {}, host)
    found = load_extension(name, ENTRY_POINT_GROUP, (), noun="environment")
    if isinstance(found, type):
        _check_arguments(name, found, arguments or {})
        return _open_class(name, found, arguments or {})
    environment = found
    if inspect.isroutine(found):
        _check_arguments(name, found, arguments or {})
        environment = found(**(arguments or {}))
    if not isinstance(environment, Environment):
        raise NoEnvironment(f"{name!r} leads to {type(environment).__name__}, which lacks a method of Environment.")
    return environment


def _open_class(name: str, kind: type[object], arguments: JsonObject) -> Environment:
    if issubclass(kind, Environment):
        return cast("Callable[..., Environment]", kind)(**arguments)
    if issubclass(kind, Steps):
        make_steps = cast("Callable[..., Steps]", kind)
        return LoopEnvironment(lambda: StepsWorld(make_steps(**arguments)))
    if issubclass(kind, Interaction):
        make_interaction = cast("Callable[..., Interaction]", kind)
        return LoopEnvironment(lambda: InteractionWorld(make_interaction(**arguments)))
    protocols = (Environment, Steps, Interaction)
    missing = "; ".join(f"of {each.__name__}: {', '.join(_missing(kind, each))}" for each in protocols)
    raise NoEnvironment(f"{name!r} is no environment, it lacks methods {missing}.")


def _missing(kind: type[object], protocol: type[object]) -> list[str]:
    names = [name for name in vars(protocol) if not name.startswith("_")]
    return [name for name in names if not hasattr(kind, name)]


def _check_arguments(name: str, make: Callable[..., object], arguments: JsonObject) -> None:
    try:
        inspect.signature(make).bind(**arguments)
    except TypeError as error:
        raise NoEnvironment(f"{name!r} does not take these arguments: {error}.") from error
