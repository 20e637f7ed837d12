"""Files that only their owner may read."""

import os
from collections.abc import Callable
from pathlib import Path


def create_once(path: Path, content: Callable[[], str]) -> None:
    """Create the file with this content, private to its owner, unless it exists or another process creates it first."""
    if path.exists():
        return
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(content())
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(temporary, path)  # unlike a rename, a link never replaces what another process has just created
    except FileExistsError:
        pass
    finally:
        temporary.unlink()
