"""The clients of engines: which class a kind of engine has, and a pool with one open client for each engine."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from app.inference.engine import EngineAddress, EngineClient
from app.inference.keys import EngineKeys
from app.inference.sglang.client import SGLangClient
from app.inference.transport import EngineUnavailable
from app.inference.vllm.client import VLLMClient

READ_TIMEOUT_SECONDS = 120.0

# By `Engine.kind`: (URL, API key, admin key, longest time without data in seconds) → client.
CLIENT_BY_KIND: dict[str, Callable[[str, str | None, str | None, float], EngineClient]] = {
    "sglang": SGLangClient,
    "vllm": VLLMClient,
}


def connect(engine: EngineAddress, keys: EngineKeys, *, read_timeout: float = READ_TIMEOUT_SECONDS) -> EngineClient:
    """Return a new client of an engine.

    `read_timeout`: the longest time without data while a reply is generated, in seconds.

    Raises:
        EngineUnavailable: this release knows no engine of this kind. A newer one may have registered it.
    """
    make_client = CLIENT_BY_KIND.get(engine.kind)
    if make_client is None:
        known = ", ".join(sorted(CLIENT_BY_KIND))
        raise EngineUnavailable(f"The engine at {engine.url} is of kind '{engine.kind}'; this release knows {known}.")
    return make_client(engine.url, keys.api, keys.admin, read_timeout)


class EnginePool(AbstractAsyncContextManager["EnginePool"]):
    """One open client for each engine. As a context manager it closes them at the end of the block."""

    def __init__(self, keys: EngineKeys, *, read_timeout: float = READ_TIMEOUT_SECONDS) -> None:
        """`read_timeout`: the longest time without data while a reply is generated, in seconds."""
        self._keys = keys
        self._read_timeout = read_timeout
        self._clients: dict[tuple[str, str], EngineClient] = {}

    def get(self, engine: EngineAddress) -> EngineClient:
        """Return the engine's client. Raises what `connect` raises."""
        key = engine.kind, engine.url  # another kind may have been started at the same address
        if key not in self._clients:
            self._clients[key] = connect(engine, self._keys, read_timeout=self._read_timeout)
        return self._clients[key]

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()
        self._clients.clear()
