"""One client per engine address, kept open."""

from app.inference.client import EngineClient
from app.inference.keys import EngineKeys


class EnginePool:
    def __init__(self, keys: EngineKeys, *, patience: float = 120.0) -> None:
        """`patience`: the longest silence, in seconds, of a reply that is being made."""
        self._keys, self._patience = keys, patience
        self._clients: dict[str, EngineClient] = {}

    def at(self, url: str) -> EngineClient:
        if url not in self._clients:
            self._clients[url] = EngineClient(url, self._keys.api, self._keys.admin, patience=self._patience)
        return self._clients[url]

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()
        self._clients.clear()
