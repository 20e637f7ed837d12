"""Start SGLang's server: `python -m attune_sglang_cpu.launch --parent PID <SGLang's own flags>`.

On a GPU SGLang spawns its child processes, and a spawned child imports its parent's main module first, which is this
one. The statements at its top therefore run before SGLang in every process.
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
# Keys come from the environment, since everybody who may list processes can read their flags.
KEYS = {"ATTUNE_ENGINE__API_KEY": "--api-key", "ATTUNE_ENGINE__ADMIN_KEY": "--admin-api-key"}


def exit_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends for any reason. SGLang's child processes end too."""
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # the parent ended before the call
        sys.exit("the supervisor is gone: not starting an engine without it")


def fork_children() -> None:
    """Make SGLang fork its child processes instead of spawning them.

    A spawned child repeats its parent's imports, which takes ten seconds. Without a GPU, forking is safe, and start-up
    takes 11 seconds instead of 22.
    """
    set_start_method = multiprocessing.set_start_method

    def set_to_fork(method: str | None, force: bool = False) -> None:
        set_start_method("fork", force)

    multiprocessing.set_start_method = set_to_fork


def main() -> None:
    if sys.argv[1:2] == ["--parent"]:
        exit_with_parent(int(sys.argv[2]))
        del sys.argv[1:3]
    keys = [f"{flag}={os.environ.pop(name)}" for name, flag in KEYS.items() if name in os.environ]
    if not torch.cuda.is_available():
        fork_children()

    # Not at the top: a spawned child imports only what it needs of SGLang.
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
