"""An SGLang platform for machines that have no accelerator: plain torch on plain CPUs."""

import torch


def activate() -> str | None:
    """SGLang asks every installed platform; on a GPU the answer is None and SGLang stays native."""
    if torch.cuda.is_available():
        return None
    return "attune_sglang_cpu.platform:TorchCpuPlatform"
