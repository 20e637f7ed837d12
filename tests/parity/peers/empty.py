"""Import modules of a package without running its `__init__`, for peers with heavy dependencies."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def open_empty(*names: str) -> Path:
    """Register empty packages of a peer, so their modules can be imported. Return the peer's directory."""
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


def module_of(name: str, **contents: object) -> ModuleType:
    """Register a module with only these names in place of the real one."""
    module = ModuleType(name)
    vars(module).update(contents)
    sys.modules[name] = module
    return module
