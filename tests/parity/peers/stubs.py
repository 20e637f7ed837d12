"""Stub packages and modules, so that the formulas of peers with heavy dependencies can be imported without these."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def register_empty_packages(*names: str) -> Path:
    """Register empty packages, so that their modules are imported without `__init__`. Return the peer's directory."""
    top = names[0].split(".")[0]
    spec = importlib.util.find_spec(top)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{top} is not installed here")
    root = Path(spec.origin).parent
    for name in names:
        package = ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    return root


def register_module(name: str, **contents: object) -> ModuleType:
    """Register a module with only these names in place of the real one."""
    module = ModuleType(name)
    vars(module).update(contents)
    sys.modules[name] = module
    return module
