"""A pool with one open client for each engine, and the engines' API keys."""

import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from app.core.settings import Settings
from app.inference.client import EngineClient


@dataclass(frozen=True)
class EngineKeys:
    """The two API keys of all engines of a deployment."""

    api: str
    admin: str


def load_engine_keys(settings: Settings) -> EngineKeys:
    """Return the keys from the settings, or from a file under `home` that is created at first use.

    Machines that share engines set the keys explicitly.
    """
    if settings.engine_api_key and settings.engine_admin_key:
        return EngineKeys(settings.engine_api_key, settings.engine_admin_key)
    path = settings.home.resolve() / "engine-keys.json"
    if not path.exists():
        _create_keys(path)
    return EngineKeys(**json.loads(path.read_text()))


def _create_keys(path: Path) -> None:
    """Write new keys to a file that only its owner can read, unless another process has created it first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    keys = {"api": secrets.token_urlsafe(32), "admin": secrets.token_urlsafe(32)}
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(keys, file)
    try:
        os.link(temporary, path)  # unlike a rename, a link never replaces keys that another process has just created
    except FileExistsError:
        pass
    finally:
        temporary.unlink()


class EnginePool:
    """One open client for each engine URL. As a context manager it closes them at the end of the block."""

    def __init__(self, keys: EngineKeys, *, read_timeout: float = 120.0) -> None:
        """`read_timeout`: the longest time without data while a reply is generated, in seconds."""
        self._keys, self._read_timeout = keys, read_timeout
        self._clients: dict[str, EngineClient] = {}

    def get(self, url: str) -> EngineClient:
        if url not in self._clients:
            self._clients[url] = EngineClient(url, self._keys.api, self._keys.admin, read_timeout=self._read_timeout)
        return self._clients[url]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()
        self._clients.clear()
