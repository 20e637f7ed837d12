"""Scopes of API keys: what each may do, and which others it includes.

Each route needs exactly one scope (`required_scope`); docs/scopes.md has the table.
"""

from collections.abc import Callable, Collection
from functools import lru_cache
from typing import TypeVar

from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

F = TypeVar("F", bound=Callable[..., object])
PROGRAMS_SCOPE = "feedback:programs"  # with `feedback`: feedback whose source is a program (CODE) or a judge
CONTENT_SCOPE = "viewer:content"  # with `viewer`: what people wrote, and who they are
SCOPES = ("chat", "feedback", PROGRAMS_SCOPE, "viewer", CONTENT_SCOPE, "annotator", "operator", "admin")
INCLUDED = {
    CONTENT_SCOPE: ("viewer",),
    "annotator": ("feedback",),
    "operator": (CONTENT_SCOPE, "annotator"),
    "admin": ("operator",),
}
_SCOPE_OF: dict[Callable[..., object], str] = {}  # of dependencies


@lru_cache(maxsize=1024)
def expand_scopes(scopes: tuple[str, ...]) -> frozenset[str]:
    """Return the scopes with all that they include. Example: ("annotator",) -> {"annotator", "feedback"}."""
    included = {other for scope in scopes for other in expand_scopes(INCLUDED.get(scope, ()))}
    return frozenset(scopes) | included


def has_scope(scopes: Collection[str], scope: str) -> bool:
    """Return whether a key with these scopes may do what `scope` allows."""
    return scope in expand_scopes(tuple(scopes))


def checks_scope(scope: str) -> Callable[[F], F]:
    """Mark a dependency as the one that checks the scope of its routes."""

    def mark(dependency: F) -> F:
        _SCOPE_OF[dependency] = scope
        return dependency

    return mark


def required_scope(route: APIRoute) -> str | None:
    """Return the scope that a route needs; None if it needs none. Raises ValueError where it checks several."""
    scopes = set(_scopes_of(route.dependant))
    if len(scopes) > 1:
        raise ValueError(f"{route.path} checks several scopes: {sorted(scopes)}")
    return next(iter(scopes), None)


def _scopes_of(dependant: Dependant) -> list[str]:
    own = [_SCOPE_OF[dependant.call]] if dependant.call in _SCOPE_OF else []
    return own + [scope for dependency in dependant.dependencies for scope in _scopes_of(dependency)]
