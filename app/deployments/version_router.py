"""The version router: which version a model name means, which version answers a request, and which engines have it.

A request that names a policy only may be answered by another policy that takes a share of its traffic, unless it is
pinned (`app.deployments.traffic`). Of the policy that answers, it is the first of these versions that applies:

1. a pin of its conversation, its end user or its API key;
2. that of its episode: for the first chat of one in a group, the version that the group's other attempts started on;
   for later chats the first one's version, if the episode has a leash or is pinned;
3. where conversations are sticky, the version of the conversation's previous turn;
4. the canary, if the end user or the conversation falls in its share;
5. the version that the deployment serves.

What a name means and which engines have the version is read with one statement each, for every chat request that
misses the router's cache.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Executable, SQLColumnExpression, and_, bindparam, case, exists, or_, select
from sqlalchemy.engine import Connection
from sqlalchemy.orm import aliased

from app.core.cache import SingleFlightCache
from app.core.database import Database
from app.core.errors import AttuneError, NotFound, Unavailable, require_row
from app.core.rows import AnyRow
from app.deployments.traffic import Branch, find_branch, read_branches
from app.engines import load_errors
from app.engines.fleet import is_loaded
from app.models import (
    ANSWERING,
    ConversationRouting,
    Deployment,
    Engine,
    EngineState,
    Pin,
    PinKind,
    Policy,
    RouteReason,
    Version,
    VersionState,
)
from app.policies.references import format_reference, parse_reference

# Versions in these states never answer a request, whatever it names.
NOT_SERVABLE = (VersionState.SHADOW, VersionState.SHADOW_PASSED, VersionState.REJECTED)
BY_NUMBER = "v#"  # a key of SELECT_BY_ALIAS that is no alias
UNLOADABLE_RETRY_SECONDS = 30.0  # files are restored by people
MAX_ROUTES = 1024  # more names than this within the cache's lifetime are guesses of a client


class RoutedEngine(NamedTuple):
    """A ready engine that has loaded a version."""

    name: str
    url: str
    kind: str


@dataclass(frozen=True)
class ResolvedModel:
    """The version that `policy`, `policy@stable`, `policy@previous`, `policy@canary` or `policy@v12` means now."""

    policy: str
    policy_id: str
    base_model: str
    version_id: str
    number: int
    adapter: str | None  # as Version.adapter
    weights: str | None  # as Version.weights
    state: str
    created_at: float

    @property
    def can_continue(self) -> bool:
        """Whether a sticky conversation may stay on the version; it leaves one that was rolled back."""
        return self.state in (VersionState.LIVE, VersionState.SUPERSEDED, VersionState.CANARY)

    @property
    def name(self) -> str:
        """Example: "assistant@v12"."""
        return format_reference(self.policy, self.number)


@dataclass(frozen=True)
class RoutingRules:
    """What may send a request to another version than the one that serves. Empty for a request that names a version."""

    canary_version_id: str | None = None
    canary_share: float = 0.0
    pins: bool = False
    sticky: bool = False
    branches: tuple[Branch, ...] = ()


@dataclass(frozen=True)
class Route:
    model: ResolvedModel
    engines: tuple[RoutedEngine, ...]  # empty only where the rules may select another version
    route_reason: str = RouteReason.REQUESTED
    rules: RoutingRules = RoutingRules()
    is_unloadable: bool = False  # an engine has tried to load the version, and could not


class VersionNotLoaded(Unavailable):
    """Engines are ready, and none of them has loaded the requested version."""


def version_not_loaded(model: ResolvedModel, *, is_unloadable: bool) -> VersionNotLoaded:
    if not is_unloadable:
        return VersionNotLoaded(f"No ready engine has loaded {model.name} yet; try again in a moment.")
    return VersionNotLoaded(
        f"No engine can load {model.name}: `attune status` names what is wrong with its files. Once they are restored, "
        "the version is loaded without a restart; `attune rollback` serves an earlier version at once.",
        code="version_not_loadable",
        retry_after=UNLOADABLE_RETRY_SECONDS,
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


def read_route(connection: Connection, project_id: str, model: str) -> Route:
    """Return the route of a model name. Raises NotFound, Unavailable."""
    row = _read_model_row(connection, project_id, model)
    _require_answering(row)
    reference = parse_reference(model)
    resolved = _resolved_model(row, reference.names_version)
    ready = _read_ready_engines(connection)
    engines, is_unloadable = _engines_with(ready, resolved), _is_unloadable(ready, resolved)
    if reference.names_version:
        # The reconciler loads the stable, the previous and the canary version, but no full weights that served before.
        # The base model needs no adapter, so every engine has it, or it is a version of full weights.
        managed = reference.alias in SELECT_BY_ALIAS and not (
            reference.alias == "previous" and resolved.adapter is None
        )
        if not engines and (managed or is_unloadable):
            raise version_not_loaded(resolved, is_unloadable=is_unloadable)
        return Route(resolved, _require_engines(engines, resolved))
    rules = RoutingRules(
        row.canary_version_id,
        row.canary_share,
        row.pins,
        row.conversations == ConversationRouting.STICKY,
        read_branches(connection, row.policy_id) if row.branches else (),
    )
    return Route(resolved, engines, RouteReason.STABLE, rules, is_unloadable)


def read_version_route(connection: Connection, version_id: str) -> Route:
    """Return the route of one version. Raises NotFound, also where no ready engine has loaded it."""
    row = connection.execute(SELECT_BY_ID, {"version": version_id}).one_or_none()
    row = require_row(row, "This version does not exist.", code="model_not_found", param="model")
    resolved = _resolved_model(row, True)
    return Route(resolved, _require_engines(_engines_with(_read_ready_engines(connection), resolved), resolved))


def resolve_model(connection: Connection, project_id: str, model: str, *, archived: bool = False) -> ResolvedModel:
    """Return what a model name means, with `archived` also that of an archived policy.

    Raises NotFound, which says whether the policy is archived, or the policy or the version is unknown.
    """
    row = _read_model_row(connection, project_id, model)
    if not archived:
        _require_answering(row)
    return _resolved_model(row, parse_reference(model).names_version)


def _require_answering(row: AnyRow) -> None:
    """Raise NotFound for an archived policy."""
    if row.policy_state not in ANSWERING:
        message = (
            f"Policy '{row.policy}' is archived and answers no chats. GET /v1/models lists those that do; an admin "
            f"brings it back with POST /v1/policies/{row.policy}/unarchive."
        )
        raise NotFound(message, code="policy_archived", param="model")


def _read_ready_engines(connection: Connection) -> Sequence[AnyRow]:
    """Return the ready engines. Raises Unavailable when there are none."""
    engines = connection.execute(SELECT_READY_ENGINES).all()
    if not engines:
        raise Unavailable("No engine is ready; try again in a moment.")
    return engines


def _engines_with(ready: Sequence[AnyRow], model: ResolvedModel) -> tuple[RoutedEngine, ...]:
    """Return those that have loaded the version."""
    return tuple(RoutedEngine(row.name, row.url, row.kind) for row in ready if is_loaded(row, model))


def _is_unloadable(ready: Sequence[AnyRow], model: ResolvedModel) -> bool:
    """Whether one of these engines has recorded that it cannot load the version."""
    return any(model.adapter in load_errors.read(row) for row in ready)


def _require_engines(engines: tuple[RoutedEngine, ...], model: ResolvedModel) -> tuple[RoutedEngine, ...]:
    """Raise NotFound if there are none."""
    if not engines:
        raise NotFound(f"{model.name} is not loaded.", code="model_not_found", param="model")
    return engines


def _read_model_row(connection: Connection, project_id: str, model: str) -> Any:
    name, alias, number = parse_reference(model)
    params = {"project": project_id, "name": name, "number": -1 if number is None else number}
    query = SELECT_BY_ALIAS.get(BY_NUMBER if number is not None else alias or "stable")
    row = connection.execute(query, params).one_or_none() if query is not None else None
    if row is not None:
        return row
    policy_exists = connection.execute(SELECT_POLICY, params).one_or_none() is not None
    if policy_exists:
        message = f"Policy '{name}' has no version '{alias or 'stable'}'."
    else:
        message = f"There is no policy named '{name}'."
    raise NotFound(message, code="model_not_found", param="model")


def _resolved_model(row: AnyRow, names_version: bool) -> ResolvedModel:
    created_at = row.version_created_at if names_version else row.policy_created_at
    return ResolvedModel(**{name: getattr(row, name) for name in MODEL_COLUMNS}, created_at=created_at)


MODEL_COLUMNS: dict[str, SQLColumnExpression[Any]] = {  # by field of ResolvedModel
    "policy": Policy.name,
    "policy_id": Policy.id,
    "base_model": Policy.base_model,
    "version_id": Version.id,
    "number": Version.number,
    "adapter": Version.adapter,
    "weights": Version.weights,
    "state": Version.state,
}


BRANCH = aliased(Policy)


def _select_model(*conditions: ColumnElement[bool]) -> Executable:
    query: Executable = (
        select(
            *(column.label(name) for name, column in MODEL_COLUMNS.items()),
            Policy.created_at.label("policy_created_at"),
            Version.created_at.label("version_created_at"),
            Deployment.canary_version_id,
            Deployment.canary_share,
            Policy.conversations,
            Policy.state.label("policy_state"),
            exists().where(Pin.policy_id == Policy.id).label("pins"),
            exists().where(BRANCH.traffic_from_id == Policy.id).correlate(Policy).label("branches"),
        )
        .join(Deployment, Deployment.policy_id == Policy.id)
        .join(Version, Version.policy_id == Policy.id)
        .where(*conditions, Version.state.not_in(NOT_SERVABLE))
    )
    return query


# Built once: building a statement costs more than running it.
_POLICY_MATCHES = and_(Policy.project_id == bindparam("project"), Policy.name == bindparam("name"))
SELECT_POLICY = select(Policy.id).where(_POLICY_MATCHES)
SELECT_BY_ALIAS = {
    "stable": _select_model(_POLICY_MATCHES, Version.id == Deployment.version_id),
    "previous": _select_model(_POLICY_MATCHES, Version.id == Deployment.previous_version_id),
    "canary": _select_model(_POLICY_MATCHES, Version.id == Deployment.canary_version_id),
    BY_NUMBER: _select_model(_POLICY_MATCHES, Version.number == bindparam("number")),
}
SELECT_BY_ID = _select_model(Version.id == bindparam("version"))
SELECT_PIN = (
    select(Pin.version_id)
    .where(
        Pin.policy_id == bindparam("policy"),
        or_(*(and_(Pin.kind == kind, Pin.subject == bindparam(kind.value)) for kind in PinKind)),
    )
    .order_by(case({kind: rank for rank, kind in enumerate(PinKind)}, value=Pin.kind))
    .limit(1)
)
SELECT_READY_ENGINES = (
    select(
        Engine.name,
        Engine.url,
        Engine.kind,
        Engine.loaded,
        Engine.weights,
        Engine.swapping_until,
        Engine.state,
        Engine.reason,
    )
    .where(Engine.state == EngineState.READY)
    .order_by(Engine.name)
)
