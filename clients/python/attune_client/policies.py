"""Versions, deployments and pins of policies. Needs a key with the scope `operator`; to read them, `viewer`.

Acts are sent with an Idempotency-Key that is made before the first try: a retry has no second effect.
"""

import uuid
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from attune_client.transport import Request

R = TypeVar("R")
JSON = dict[str, Any]


class _Policies(Generic[R]):
    def __init__(self, send: Callable[[Request], R]) -> None:
        self._send = send

    def get(self, policy: str) -> R:
        """Return a policy: what serves, and how it learns."""
        return self._send(Request("GET", _path(policy)))

    def versions(self, policy: str, *, limit: int = 20, before: int | None = None) -> R:
        """Return the newest versions with their statistics; `before` is a version's number."""
        return self._send(Request("GET", _path(policy, "versions"), params={"limit": limit, "before": before}))

    def deployment(self, policy: str) -> R:
        """Return which version serves, and the canary and the shadow deployment."""
        return self._send(Request("GET", _path(policy, "deployment")))

    def deploy(self, policy: str, version: int, *, share: float | None = None, reason: str | None = None) -> R:
        """Deploy a version to everybody or, with `share`, to some as a canary."""
        return self._post(_path(policy, "deploy"), version=version, share=share, reason=reason)

    def rollback(self, policy: str, *, version: int | None = None, reason: str | None = None) -> R:
        """Abort the canary, or serve the parent version again, or the one that is named."""
        return self._post(_path(policy, "rollback"), version=version, reason=reason)

    def pins(self, policy: str, *, limit: int = 20, after: str | None = None) -> R:
        """Return a page of the pins."""
        return self._send(Request("GET", _path(policy, "pins"), params={"limit": limit, "after": after}))

    def pin(self, policy: str, kind: str, subject: str, version: int, *, reason: str | None = None) -> R:
        """Pin a conversation, an end user or an API key to a version; `kind` is conversation, user or key."""
        body = {"kind": kind, "subject": subject, "version": version, "reason": reason}
        return self._send(Request("PUT", _path(policy, "pins"), _without_none(body)))

    def unpin(self, policy: str, pin_id: str) -> R:
        """Remove a pin."""
        return self._send(Request("DELETE", _path(policy, "pins", pin_id)))

    def _post(self, path: str, **body: Any) -> R:
        headers = {"idempotency-key": str(uuid.uuid4())}
        return self._send(Request("POST", path, _without_none(body), headers=headers))


class Policies(_Policies[JSON]):
    """Versions, deployments and pins; each method returns the response of the API."""


class AsyncPolicies(_Policies[Awaitable[JSON]]):
    """Versions, deployments and pins; the asynchronous form of Policies."""


def _path(policy: str, *parts: str) -> str:
    return "/".join(["/v1/policies", *(quote(part, safe="") for part in (policy, *parts))])


def _without_none(body: JSON) -> JSON:
    return {name: value for name, value in body.items() if value is not None}
