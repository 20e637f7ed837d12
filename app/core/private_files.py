"""Files that only their owner may read."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def create_once(path: Path, content: Callable[[], str]) -> None:
    """Create the file with this content, private to its owner, unless it exists or another process creates it first."""
    if path.exists():
        return
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(content())
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)  # unlike a rename, a link never replaces what another process has just created
    except FileExistsError:
        pass
    finally:
        os.unlink(temporary)
