"""Keys of episodes: each acts for the API key that created its episode, and only for that episode.

A key is derived from the creator's key and the episode's id, so that a repeated request to create the episode returns
the same key, although only its hash is stored. It has the creator's limits and consent, and ends with the creator's
key, or a day after the episode.
"""

import base64
import hashlib
import hmac
from collections.abc import Callable
from typing import TypeVar

from fastapi import Request
from sqlalchemy import ColumnElement, or_

from app.core.database import now
from app.core.errors import Forbidden
from app.models import Episode
from app.projects.scopes import PROGRAMS_SCOPE, has_scope

F = TypeVar("F", bound=Callable[..., object])
PREFIX = "sk-ep-"
SCOPES = ("chat", "feedback", PROGRAMS_SCOPE)  # those of them that the creator's key has
SECONDS_AFTER_END = 86_400.0  # for late feedback, and for an error that says more than that the key is unknown
_ENDPOINTS: set[Callable[..., object]] = set()


def derive_key(creator_key: str, episode_id: str) -> str:
    """Return the key of an episode. Who does not know the creator's key, of 256 random bits, cannot compute it."""
    digest = hmac.digest(creator_key.encode(), f"attune-episode:{episode_id}".encode(), hashlib.sha256)
    return PREFIX + base64.urlsafe_b64encode(digest).decode().rstrip("=")


def select_scopes(creator_scopes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the scopes of an episode's key."""
    return tuple(scope for scope in SCOPES if has_scope(creator_scopes, scope))


def key_is_valid() -> ColumnElement[bool]:
    """Return the condition that the key of an Episode may still be used, as far as the episode tells."""
    return or_(Episode.ended_at.is_(None), Episode.ended_at > now() - SECONDS_AFTER_END)


def takes_episode_keys(endpoint: F) -> F:
    """Mark the handler of a route that the keys of episodes may call. All other routes refuse them."""
    _ENDPOINTS.add(endpoint)
    return endpoint


def require_episode_route(request: Request) -> None:
    """Raise Forbidden if the route of this request is none for keys of episodes."""
    endpoint = getattr(request.scope.get("route"), "endpoint", None)
    if endpoint not in _ENDPOINTS:
        message = "The key of an episode serves its chats, its feedback and its end; use an API key of the project."
        raise Forbidden(message, code="episode_key")
