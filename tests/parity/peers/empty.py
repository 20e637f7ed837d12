"""Packages opened without running their `__init__`, for peers whose formulas need less than their packages import."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def open_empty(*names: str) -> Path:
    """Registers packages of one peer so that their modules can be imported; answers where the peer is installed."""
    top = names[0].split(".")[0]
    found = importlib.util.find_spec(top)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"{top} is not installed here")
    root = Path(found.origin).parent
    for name in names:
        package = ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    return root


def module_of(name: str, **contents: object) -> ModuleType:
    """A module that holds these names and no more, in place of the real one."""
    module = ModuleType(name)
    vars(module).update(contents)
    sys.modules[name] = module
    return module
