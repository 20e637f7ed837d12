"""The two keys of an engine: made once per deployment, readable by its owner alone."""

import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from app.core.settings import Settings


@dataclass(frozen=True)
class EngineKeys:
    api: str
    admin: str


def engine_keys(settings: Settings) -> EngineKeys:
    """From the environment when several machines share them, else from a file under home, made at first use."""
    if settings.engine_api_key and settings.engine_admin_key:
        return EngineKeys(settings.engine_api_key, settings.engine_admin_key)
    path = settings.home.resolve() / "engine-keys.json"
    if not path.exists():
        _make(path)
    return EngineKeys(**json.loads(path.read_text()))


def _make(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    keys = {"api": secrets.token_urlsafe(32), "admin": secrets.token_urlsafe(32)}
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(keys, file)
    try:
        os.link(fresh, path)  # unlike a rename, this never replaces keys that another process has just made
    except FileExistsError:
        pass
    finally:
        fresh.unlink()
