"""The KV allocator of the CPU platform: one token a page."""

from typing import Any

import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator


class SinglePageAllocator(TokenToKVPoolAllocator):
    """SGLang offers a page size to an out-of-tree allocator; the plain one knows only pages of one token."""

    def __init__(
        self, size: int, page_size: int, dtype: torch.dtype, device: str, kvcache: Any, need_sort: bool
    ) -> None:
        assert page_size == 1, f"the CPU platform serves pages of one token, not {page_size}"
        super().__init__(size, dtype, device, kvcache, need_sort)
