"""The KV cache allocator of the CPU platform: one token per page."""

from typing import Any

import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator


class SinglePageAllocator(TokenToKVPoolAllocator):
    """SGLang passes a page size to the allocator of a plug-in; its plain allocator has pages of one token only."""

    def __init__(
        self, size: int, page_size: int, dtype: torch.dtype, device: str, kvcache: Any, need_sort: bool
    ) -> None:
        assert page_size == 1, f"the CPU platform has pages of one token, not {page_size}"
        super().__init__(size, dtype, device, kvcache, need_sort)
