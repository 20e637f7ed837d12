"""Resolving: what a model's name means just now, and which engines hold it; read in one statement each."""

import re
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Executable, and_, bindparam, case, exists, or_, select
from sqlalchemy.engine import Connection

from app.core.errors import NotFound, Unavailable
from app.models import (
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

# Nobody hears these, whatever a request names.
UNHEARD = (VersionState.SHADOW, VersionState.SHADOW_PASSED, VersionState.REJECTED)
NUMBER = "v#"  # no alias is called so
NUMBERED = re.compile(r"v(\d{1,9})")
Holders = tuple[tuple[str, str], ...]  # name and url of each ready engine that holds a version


@dataclass(frozen=True)
class Named:
    """What `policy`, `policy@stable`, `policy@previous`, `policy@canary` or `policy@v12` means just now."""

    policy: str
    policy_id: str
    base_model: str
    version_id: str
    number: int
    adapter: str | None  # as of Version
    weights: str | None
    state: str
    created_at: float

    @property
    def may_go_on(self) -> bool:
        """Whether a conversation may stay on it. What was taken back is left by everybody who is not pinned to it."""
        return self.state in (VersionState.LIVE, VersionState.SUPERSEDED, VersionState.CANARY)

    @property
    def label(self) -> str:
        """Example: "assistant@v12"."""
        return f"{self.policy}@v{self.number}"


@dataclass(frozen=True)
class Beside:
    """What a policy has beside its pointer. Of a request that names a version nothing of it counts."""

    canary_version_id: str | None = None
    canary_share: float = 0.0
    pins: bool = False
    sticky: bool = False


@dataclass(frozen=True)
class Route:
    named: Named
    engines: Holders  # none only where something beside it may answer instead
    route_reason: str = RouteReason.REQUESTED
    beside: Beside = Beside()


def route(connection: Connection, project_id: str, model: str) -> Route:
    row = _meant(connection, project_id, model)
    named = _named(row, "@" in model)
    holders = _ready(connection, named)
    if "@" in model:
        alias = model.partition("@")[2]
        # Full weights that served before are brought to nobody; and the base model is everywhere, or is those.
        brought = alias in MEANT and not (alias == "previous" and named.adapter is None)
        return Route(named, _some(holders, named, pointed=brought))
    beside = Beside(row.canary_version_id, row.canary_share, row.pins, row.conversations == ConversationRouting.STICKY)
    return Route(named, holders, RouteReason.STABLE, beside)


def route_to(connection: Connection, version_id: str) -> Route:
    row = connection.execute(EXACTLY, {"version": version_id}).one_or_none()
    if row is None:
        raise NotFound("This version is not there.", code="model_not_found", param="model")
    named = _named(row, True)
    return Route(named, _some(_ready(connection, named), named))


def _ready(connection: Connection, named: Named) -> Holders:
    """The ready engines that hold it, if any do."""
    engines = connection.execute(READY).all()
    if not engines:
        raise Unavailable("No engine is ready; try again in a moment.")
    return tuple((row.name, row.url) for row in engines if _holds(row, named))


def _holds(engine: Any, named: Named) -> bool:
    """As service.holds, of the columns that are read here."""
    if engine.swapping_until is not None or engine.weights != named.weights:
        return False
    return named.adapter in (None, *engine.loaded)


def _some(holders: Holders, named: Named, *, pointed: bool = False) -> Holders:
    """`pointed`: that nobody holds it is no fault of who asks; the sweep is bringing it."""
    if not holders and pointed:
        raise unheld(named)
    if not holders:
        raise NotFound(f"{named.label} is not loaded.", code="model_not_found", param="model")
    return holders


class VersionNotLoaded(Unavailable):
    """Engines are ready, and none has what was asked for just now."""


def unheld(named: Named) -> VersionNotLoaded:
    return VersionNotLoaded(f"No ready engine holds {named.label} yet; try again in a moment.")


def resolve(connection: Connection, project_id: str, model: str) -> Named:
    """Raises NotFound, which says whether it is the policy or the version that is not there."""
    return _named(_meant(connection, project_id, model), "@" in model)


def _meant(connection: Connection, project_id: str, model: str) -> Any:
    name, _, alias = model.partition("@")
    numbered = NUMBERED.fullmatch(alias)
    asked = {"project": project_id, "name": name, "number": int(numbered[1]) if numbered else -1}
    meant = MEANT.get(NUMBER if numbered else alias or "stable")
    found = connection.execute(meant, asked).one_or_none() if meant is not None else None
    if found is not None:
        return found
    known = connection.execute(MINE, asked).one_or_none()
    told = f"Policy '{name}' has no version '{alias}'." if known else f"There is no policy named '{name}'."
    raise NotFound(told, code="model_not_found", param="model")


def _named(row: Any, by_version: bool) -> Named:
    return Named(
        policy=row.policy,
        policy_id=row.policy_id,
        base_model=row.base_model,
        version_id=row.version_id,
        number=row.number,
        adapter=None if row.full_weights else row.adapter_name,
        weights=row.adapter_name if row.full_weights else None,
        state=row.state,
        created_at=row.version_made if by_version else row.policy_made,
    )


def _statement(*meant: ColumnElement[bool]) -> Executable:
    statement: Executable = (
        select(
            Policy.name.label("policy"),
            Policy.id.label("policy_id"),
            Policy.base_model,
            Policy.created_at.label("policy_made"),
            Version.id.label("version_id"),
            Version.number,
            Version.adapter_name,
            Version.full_weights,
            Version.state,
            Version.created_at.label("version_made"),
            Deployment.canary_version_id,
            Deployment.canary_share,
            Policy.conversations,
            exists().where(Pin.policy_id == Policy.id).label("pins"),
        )
        .join(Deployment, Deployment.policy_id == Policy.id)
        .join(Version, Version.policy_id == Policy.id)
        .where(*meant, Version.state.not_in(UNHEARD))
    )
    return statement


# Built once: making a statement anew costs more than running it.
OWN = and_(Policy.project_id == bindparam("project"), Policy.name == bindparam("name"))
MINE = select(Policy.id).where(OWN)
MEANT = {
    "stable": _statement(OWN, Version.id == Deployment.version_id),
    "previous": _statement(OWN, Version.id == Deployment.previous_version_id),
    "canary": _statement(OWN, Version.id == Deployment.canary_version_id),
    NUMBER: _statement(OWN, Version.number == bindparam("number")),
}
EXACTLY = _statement(Version.id == bindparam("version"))
PINNED = (
    select(Pin.version_id)
    .where(
        Pin.policy_id == bindparam("policy"),
        or_(*(and_(Pin.kind == kind, Pin.subject == bindparam(kind.value)) for kind in PinKind)),
    )
    .order_by(case({kind: at for at, kind in enumerate(PinKind)}, value=Pin.kind))
    .limit(1)
)
READY = (
    select(Engine.name, Engine.url, Engine.loaded, Engine.weights, Engine.swapping_until)
    .where(Engine.state == EngineState.READY)
    .order_by(Engine.name)
)
