"""Methods that vLLM's workers get, called by /collective_rpc."""

from typing import Any


class Worker:
    """A worker extension: its methods become those of vLLM's worker."""

    model_runner: Any

    def attune_clear_cache(self) -> None:
        """Fill the key-value cache with zeros. Broken weights leave NaN there, which reaches the replies of others."""
        for cache in self.model_runner.kv_caches:
            for tensor in cache if isinstance(cache, list | tuple) else [cache]:
                tensor.zero_()
