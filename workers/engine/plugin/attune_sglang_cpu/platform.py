"""The CPU platform: torch's own attention, SGLang's ordinary memory pools, and no pinned memory.

As an out-of-tree platform it avoids the branches of SGLang that need `sgl_kernel` or AMX.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

PINNABLE_FUNCTIONS = ("tensor", "empty", "zeros", "ones", "full", "arange", "empty_like", "zeros_like")


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_mha_kv_pool_cls(self) -> type:
        # Not at the top: SGLang's pools use the platform while they are imported.
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_paged_allocator_cls(self) -> type:
        from attune_sglang_cpu.allocator import SinglePageAllocator

        return SinglePageAllocator

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def init_backend(self) -> None:
        """Ignore requests for pinned memory: SGLang's LoRA pool makes them, and torch without CUDA refuses them."""
        for name in PINNABLE_FUNCTIONS:
            make = getattr(torch, name)
            if not hasattr(make, "__wrapped__"):
                setattr(torch, name, _unpinned(make))
        torch.Tensor.pin_memory = lambda tensor, *args, **kwargs: tensor  # type: ignore[method-assign]


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def make_unpinned(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return make_unpinned
