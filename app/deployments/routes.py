"""What a model name means, and which engines have that version. Each is read with one statement."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Executable, SQLColumnExpression, and_, bindparam, exists, select
from sqlalchemy.engine import Connection
from sqlalchemy.orm import aliased

from app.core.errors import NotFound, Unavailable, require_row
from app.core.rows import AnyRow
from app.deployments.traffic import Branch, read_branches
from app.engines import load_errors
from app.engines.fleet import is_loaded
from app.models import (
    ANSWERING,
    ConversationRouting,
    Deployment,
    Engine,
    EngineState,
    Pin,
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
