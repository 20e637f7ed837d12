"""Starts SGLang's server: `python -m attune_sglang_cpu.launch --parent PID <SGLang's own flags>`.

On a GPU SGLang spawns its children, and a spawned child imports its parent's main module first: this one. What
stands at its top thus comes before SGLang in every process.
"""

import ctypes
import multiprocessing
import os
import signal
import sys

import torch

from attune_sglang_cpu.torchvision_ops import declare_missing

declare_missing()

PR_SET_PDEATHSIG = 1
# By the environment and not as flags: whoever may list processes can read their flags.
KEYS = {"ATTUNE_ENGINE_API_KEY": "--api-key", "ATTUNE_ENGINE_ADMIN_KEY": "--admin-api-key"}


def die_with(parent: int) -> None:
    """The kernel kills this process when its parent dies, however it dies; SGLang's children follow."""
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before we asked
        sys.exit("the supervisor is gone: not starting an engine without it")


def fork_children() -> None:
    """SGLang insists on spawning, so each child imports for ten seconds what its parent has imported already.

    Without a GPU a fork breaks nothing: start-up takes 11 seconds instead of 22.
    """
    set_start_method = multiprocessing.set_start_method

    def insist(method: str | None, force: bool = False) -> None:
        set_start_method("fork", force)

    multiprocessing.set_start_method = insist


def main() -> None:
    if sys.argv[1:2] == ["--parent"]:
        die_with(int(sys.argv[2]))
        del sys.argv[1:3]
    keys = [f"{flag}={os.environ.pop(name)}" for name, flag in KEYS.items() if name in os.environ]
    if not torch.cuda.is_available():
        fork_children()

    # Here and not above: a spawned child decides for itself what it needs of SGLang.
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(prepare_server_args([*sys.argv[1:], *keys]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
