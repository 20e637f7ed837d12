"""Open an environment by its name: an entry point, `module:Class`, or a scheme such as `textarena:NAME`."""

from collections.abc import Callable

from alignment.environments.protocols import ENTRY_POINT_GROUP, Environment
from alignment.environments.tools.base import JsonObject
from alignment.extensions import extension_names

Opener = Callable[[str, JsonObject], Environment]
# What is before the colon of a name, and what opens the rest of it with the environment's arguments.
SCHEMES: dict[str, Opener] = {}


def environment_names() -> list[str]:
    """Return what can be opened by name: the entry points, and the schemes, each with a colon."""
    return [*extension_names(ENTRY_POINT_GROUP, ()), *(f"{scheme}:" for scheme in sorted(SCHEMES))]
