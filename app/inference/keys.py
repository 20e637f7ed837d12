"""The keys of the engines: one for requests of chats, one for acts."""

import json
import secrets
from dataclasses import dataclass

from app.core.private_files import create_once
from app.core.settings import Settings


@dataclass(frozen=True)
class EngineKeys:
    """The two API keys of all engines of a deployment."""

    api: str
    admin: str


def load_engine_keys(settings: Settings) -> EngineKeys:
    """Return the keys from the settings, or from a file under `home` that is created at first use.

    Machines that share engines set the keys explicitly.
    """
    if settings.engine.api_key and settings.engine.admin_key:
        return EngineKeys(settings.engine.api_key, settings.engine.admin_key)
    path = settings.home.resolve() / "engine-keys.json"
    create_once(path, lambda: json.dumps({name: secrets.token_urlsafe(32) for name in ("api", "admin")}))
    return EngineKeys(**json.loads(path.read_text()))
