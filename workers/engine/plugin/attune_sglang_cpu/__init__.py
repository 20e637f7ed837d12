"""An SGLang platform for machines without an accelerator: pure torch on any CPU."""

import torch


def activate() -> str | None:
    """Return the platform's name, or None on a GPU, where SGLang uses its own. SGLang calls this at start-up."""
    if torch.cuda.is_available():
        return None
    return "attune_sglang_cpu.platform:TorchCpuPlatform"
