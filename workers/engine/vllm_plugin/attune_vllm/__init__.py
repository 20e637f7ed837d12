"""What Attune adds to vLLM. It wraps two methods of vLLM 0.32.0; `tests/contract/engine/` fails if they change."""

import multiprocessing
import os
import sys

from attune_vllm.parent import exit_with_parent


def activate() -> None:
    """Have vLLM's child processes end with their parent. vLLM calls this at the start of each of its processes."""
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None or "ATTUNE_ENGINE__ADMIN_KEY" not in os.environ:
        return
    if not exit_with_parent(parent.pid):
        sys.exit("the engine's main process is gone")
