"""The version router: which version answers a request.

A request that names a policy only may be answered by another policy that takes a share of its traffic, unless it is
pinned (`app.deployments.traffic`). Of the policy that answers, it is the first of these versions that applies:

1. a pin of its conversation, its end user or its API key;
2. that of its episode: for the first chat of one in a group, the version that the group's other attempts started on;
   for later chats the first one's version, if the episode has a leash or is pinned;
3. where conversations are sticky, the version of the conversation's previous turn;
4. the canary, if the end user or the conversation falls in its share;
5. the version that the deployment serves.

What a name means and which engines have the version (`app.deployments.routes`) is read for every chat request that
misses the router's cache.
"""

from collections.abc import Callable
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from hashlib import blake2b

from sqlalchemy import and_, bindparam, case, or_, select
from sqlalchemy.engine import Connection

from app.core.cache import SingleFlightCache
from app.core.database import Database
from app.core.errors import AttuneError, NotFound, Unavailable
from app.deployments.routes import (
    ResolvedModel,
    Route,
    RoutingRules,
    read_route,
    read_version_route,
    version_not_loaded,
)
from app.deployments.traffic import Branch, find_branch
from app.models import Pin, PinKind, RouteReason

MAX_ROUTES = 1024  # more names than this within the cache's lifetime are guesses of a client
# Built once: building a statement costs more than running it.
SELECT_PIN = (
    select(Pin.version_id)
    .where(
        Pin.policy_id == bindparam("policy"),
        or_(*(and_(Pin.kind == kind, Pin.subject == bindparam(kind.value)) for kind in PinKind)),
    )
    .order_by(case({kind: rank for rank, kind in enumerate(PinKind)}, value=Pin.kind))
    .limit(1)
)


@dataclass(frozen=True)
class RequestIdentity:
    """What pins and canary shares look at: the caller, the conversation and the end user.

    `previous_version_id` and `previous_policy_id` are those of the conversation's previous turn. The episode wants the
    version `episode_version_id`, if that is at most `max_staleness` behind; it wants no other if it is pinned.
    """

    key_id: str
    conversation_id: str
    end_user: str | None = None
    previous_version_id: str | None = None
    previous_policy_id: str | None = None
    episode_version_id: str | None = None
    max_staleness: int | None = None
    is_pinned_by_episode: bool = False

    @property
    def split_key(self) -> str:
        """What is assigned to the canary or to the stable version: the end user, else the conversation."""
        return self.end_user or self.conversation_id


class VersionRouter:
    """Finds the route of a request. Routes are cached for `seconds`.

    Another process sees a changed deployment after `seconds` at most. Requests that come together share one read.
    """

    def __init__(self, db: Database, seconds: float) -> None:
        self._db = db
        # Errors are kept like routes: many requests may ask for a version that no engine has loaded.
        self._routes: SingleFlightCache[tuple[str, str], Route | AttuneError] = SingleFlightCache(
            seconds, max_size=MAX_ROUTES, share_seconds=seconds
        )

    async def resolve(self, project_id: str, model: str) -> Route:
        """Return the route of a model name.

        Raises NotFound for a name that cannot be requested, Unavailable when no engine is ready.
        """
        return await self._read((project_id, model), lambda connection: read_route(connection, project_id, model))

    async def select_policy_and_version(self, project_id: str, route: Route, identity: RequestIdentity) -> Route:
        """Return the route of the version that answers this request, of the policy or of one that takes a share.

        The policy itself answers where that other one cannot. Raises Unavailable, as `select_version` does.
        """
        branch = await self._find_branch(route, identity)
        if branch is not None:
            with suppress(NotFound, Unavailable):
                return await self.select_version(await self.resolve(project_id, branch.name), identity)
        return await self.select_version(route, identity)

    async def _find_branch(self, route: Route, identity: RequestIdentity) -> Branch | None:
        policy_id, branches = route.model.policy_id, route.rules.branches
        if not branches:
            return None
        if route.rules.pins and await self._pinned_version_id(policy_id, identity) is not None:
            return None
        return find_branch(policy_id, branches, identity.split_key, identity.previous_policy_id)

    async def select_version(self, route: Route, identity: RequestIdentity) -> Route:
        """Return the route of the version that answers this request, by the policy's routing rules.

        Raises Unavailable when no engine has loaded that version, or the version that the request is pinned to.
        """
        selected = await self._select(route, identity)
        if not selected.engines:
            raise version_not_loaded(selected.model, is_unloadable=selected.is_unloadable)
        return selected

    async def _select(self, route: Route, identity: RequestIdentity) -> Route:
        rules = route.rules
        if rules.pins and (pinned := await self._pinned_version_id(route.model.policy_id, identity)) is not None:
            if pinned == route.model.version_id:
                return replace(route, route_reason=RouteReason.PINNED)
            if (other := await self._version_route(pinned)) is None:
                raise Unavailable("The version that this request is pinned to is not loaded yet.", retry_after=1)
            return replace(other, route_reason=RouteReason.PINNED)
        if identity.episode_version_id is not None and route.route_reason == RouteReason.STABLE:
            other = await self._version_route(identity.episode_version_id)
            if other is not None and _may_stay(other.model, route.model, identity.max_staleness):
                return replace(other, route_reason=RouteReason.STICKY)
            if identity.is_pinned_by_episode:
                raise Unavailable("The version that this episode is pinned to is not loaded, or was rolled back.")
        continues = identity.previous_policy_id == route.model.policy_id
        if rules.sticky and continues and identity.previous_version_id is not None:
            if identity.previous_version_id == route.model.version_id:
                return route
            other = await self._version_route(identity.previous_version_id)
            if other is None or not other.model.can_continue:
                return route
            return replace(other, route_reason=RouteReason.STICKY)
        if rules.canary_version_id is None or not is_in_canary(rules, identity.split_key):
            return route
        other = await self._version_route(rules.canary_version_id)
        return route if other is None else replace(other, route_reason=RouteReason.CANARY)

    def forget(self) -> None:
        """Drop every cached route: this process has changed a deployment."""
        self._routes.forget()

    async def _version_route(self, version_id: str) -> Route | None:
        """Return the route of one version; None when no ready engine has loaded it."""
        try:
            return await self._read(("", version_id), lambda connection: read_version_route(connection, version_id))
        except NotFound:
            return None

    async def _pinned_version_id(self, policy_id: str, identity: RequestIdentity) -> str | None:
        params = {
            "policy": policy_id,
            PinKind.CONVERSATION.value: identity.conversation_id,
            PinKind.USER.value: identity.end_user,
            PinKind.KEY.value: identity.key_id,
        }
        return await self._db.run_read(lambda connection: connection.execute(SELECT_PIN, params).scalar())

    async def _read(self, key: tuple[str, str], read: Callable[[Connection], Route]) -> Route:
        async def read_or_error() -> Route | AttuneError:
            try:
                return await self._db.run_read(read)
            except AttuneError as error:
                return error

        result = await self._routes.get(key, read_or_error)
        assert result is not None
        if isinstance(result, AttuneError):
            raise copy(result)  # each request adds its own headers to it
        return result


def _may_stay(own: ResolvedModel, serving: ResolvedModel, max_staleness: int | None) -> bool:
    """Whether an episode may stay on its own version while another one serves."""
    is_near = max_staleness is None or serving.number - own.number <= max_staleness
    return own.can_continue and own.policy_id == serving.policy_id and is_near


def is_in_canary(rules: RoutingRules, split_key: str) -> bool:
    """Whether this end user or conversation is in the canary's share.

    The answer for one key and one canary never changes from True to False when the share grows. Another canary selects
    other keys.
    """
    # A cryptographic hash, because checksums of consecutive ids are correlated: neighbours would be selected together,
    # and some canaries would select the same end users as the canary before.
    digest = blake2b(f"{rules.canary_version_id}/{split_key}".encode(), digest_size=4).digest()
    return int.from_bytes(digest) < rules.canary_share * 2**32
