"""Processes that end with their parent, however it ends."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def exit_with_parent(parent: int) -> bool:
    """Have the kernel kill this process when its parent ends. Return False if it has ended already."""
    if sys.platform != "linux":
        return True
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    return os.getppid() == parent
