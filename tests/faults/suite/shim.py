"""Control shim.c, which intercepts calls of libc in a process that was started with LD_PRELOAD."""

import ctypes
import errno
import shutil
import subprocess
from pathlib import Path

FAULTS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "SIGKILL": -1}


def compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc")


def build(folder: Path) -> str:
    """Compile the shim. Return its path, for LD_PRELOAD."""
    library, cc = folder / "shim.so", compiler()
    assert cc is not None
    source = Path(__file__).with_name("shim.c")
    subprocess.run([cc, "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return str(library)


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    if not hasattr(library, "fault_arm"):
        raise RuntimeError("this process was not started with LD_PRELOAD=shim.so")
    library.fault_last.restype = ctypes.c_char_p
    return library


def arm(folder: Path, nth: int, fault: str) -> None:
    """Make the `nth` call from now on that changes something under `folder` fail with this fault."""
    _library().fault_arm(str(folder).encode(), nth, FAULTS[fault])


def disarm() -> int:
    """Disarm the shim. Return the number of counted calls, or 0 if one of them failed."""
    library = _library()
    calls = int(library.fault_calls())
    library.fault_arm(b"", 0, 0)
    return calls


def failed_call() -> str | None:
    """Return the name of the call that failed, or None."""
    library = _library()
    return library.fault_last().decode() if library.fault_hit() else None


def skew(seconds: float) -> None:
    """Shift the wall clock of this process."""
    _library().fault_skew(ctypes.c_long(int(seconds)))
