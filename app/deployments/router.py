"""Routing: which version is meant and which engines hold it, read from the database a few times a second at most.

A request that names a policy and nothing more is answered by the first of these that there is: a pin of its
conversation, its user or its key; the version its conversation began with, where conversations are sticky; the canary,
if it is in its share; what the pointer points to.
"""

import asyncio
import time
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from hashlib import blake2b

from sqlalchemy.engine import Connection

from app.core.database import Database
from app.core.errors import AttuneError, NotFound, Unavailable
from app.deployments.resolution import PINNED, Beside, Route, route, route_to, unheld
from app.models import PinKind, RouteReason

KNOWN = 1024  # routes kept; more names than this in 20 ms are somebody's guesses


@dataclass(frozen=True)
class RequestIdentity:
    """Who asks, as far as pins and shares go. `before` is the version of the turn before, if it was this policy's."""

    key_id: str
    conversation_id: str
    end_user: str | None = None
    before: str | None = None

    @property
    def unit(self) -> str:
        """Who is in a canary's share, or is not: a person, or a conversation where nobody says who speaks."""
        return self.end_user or self.conversation_id


class VersionRouter:
    """A route is at most `seconds` old when it is used: so long may a moved pointer stay unseen by this process.

    Requests that come together share one reading; a request that comes alone reads for itself.
    """

    def __init__(self, db: Database, seconds: float) -> None:
        self._db, self._seconds = db, seconds
        self._found: dict[tuple[str, str], tuple[float, asyncio.Task[Route]]] = {}

    async def find(self, project_id: str, model: str) -> Route:
        """Raises NotFound for a name that cannot be asked for, Unavailable when no engine is ready."""
        return await self._read((project_id, model), lambda connection: route(connection, project_id, model))

    async def choose(self, found: Route, speaker: RequestIdentity) -> Route:
        """The version for this very request. Raises Unavailable when no engine holds it, or the one it is pinned to."""
        chosen = await self._choose(found, speaker)
        if not chosen.engines:
            raise unheld(chosen.named)
        return chosen

    async def _choose(self, found: Route, speaker: RequestIdentity) -> Route:
        beside = found.beside
        if beside.pins and (pinned := await self._pinned(found.named.policy_id, speaker)) is not None:
            if pinned == found.named.version_id:
                return replace(found, route_reason=RouteReason.PINNED)
            if (held := await self._version(pinned)) is None:
                raise Unavailable("The version that this request is pinned to is not loaded yet.", retry_after=1)
            return replace(held, route_reason=RouteReason.PINNED)
        if beside.sticky and speaker.before is not None:
            if speaker.before == found.named.version_id:
                return found
            held = await self._version(speaker.before)
            return (
                replace(held, route_reason=RouteReason.STICKY) if held is not None and held.named.may_go_on else found
            )
        if beside.canary_version_id is None or not in_share(beside, speaker.unit):
            return found
        held = await self._version(beside.canary_version_id)
        return found if held is None else replace(held, route_reason=RouteReason.CANARY)

    def forget(self) -> None:
        """The pointer was moved by this very process."""
        self._found.clear()

    async def _version(self, version_id: str) -> Route | None:
        """None when it is not on a ready engine."""
        try:
            return await self._read(("", version_id), lambda connection: route_to(connection, version_id))
        except NotFound:
            return None

    async def _pinned(self, policy_id: str, speaker: RequestIdentity) -> str | None:
        asked = {
            "policy": policy_id,
            PinKind.CONVERSATION.value: speaker.conversation_id,
            PinKind.USER.value: speaker.end_user,
            PinKind.KEY.value: speaker.key_id,
        }
        return await self._db.run_read(lambda connection: connection.execute(PINNED, asked).scalar())

    async def _read(self, what: tuple[str, str], read: Callable[[Connection], Route]) -> Route:
        read_at, reading = self._found.get(what, (0.0, None))
        if reading is None or time.monotonic() - read_at > self._seconds:
            if len(self._found) >= KNOWN:
                self._found.clear()
            reading = asyncio.create_task(self._db.run_read(read))
            self._found[what] = (time.monotonic(), reading)
        try:
            return await asyncio.shield(reading)  # whoever leaves early must not take it from the others
        except AttuneError as error:
            raise copy(error) from None  # each request adds its own headers to it


def in_share(beside: Beside, unit: str) -> bool:
    """Always the same for a unit and a canary; who is in stays in when the share grows. Another canary takes others."""
    # Not a checksum: of ids that count up its bits are in step, so neighbours come together, and in some canaries the
    # very users of the one before.
    drawn = blake2b(f"{beside.canary_version_id}/{unit}".encode(), digest_size=4).digest()
    return int.from_bytes(drawn) < beside.canary_share * 2**32
