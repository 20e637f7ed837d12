"""Why an engine could not load a version: kept in `reason` of the engine's row, one line per version.

An engine that is not down has no other reason. The errors name versions of all projects: show a project its own only.

A version that has ended an engine MAX_CRASHES times in a row while it was loaded is not loaded there again, until its
files are others or an operator asks: nothing that can be checked beforehand was wrong with it, and each end takes the
engine from everybody.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.models import AuditAction, Engine, EngineState, Policy, Version, record_audit

MAX_CRASHES = 2
LAST_LOG_LINE = "; its last log line: "  # in the reason of an engine that is down


def read(engine: Any) -> dict[str, str]:
    """Return the errors by the adapter's name. `engine` has the attributes of Engine."""
    if engine.state == EngineState.DOWN or not engine.reason:
        return {}
    lines = (line.partition(": ") for line in engine.reason.splitlines())
    return {name: error for name, _, error in lines}


def describe_down(engine: Engine) -> str | None:
    """Return why the engine is down, as every project may read it: a line of its log may speak of others."""
    if engine.state != EngineState.DOWN or engine.reason is None:
        return None
    return engine.reason.partition(LAST_LOG_LINE)[0].partition(" (it was loading")[0]


def encode(errors: Mapping[str, str]) -> str | None:
    """Return the value of the column `reason`."""
    return "\n".join(f"{name}: {' '.join(errors[name].split())}" for name in sorted(errors)) or None


def count_crashes(engine: Any, adapter: str, manifest_sha256: str | None) -> int:
    """Return how often in a row the engine has ended while it loaded these files."""
    entry = (engine.load_crashes or {}).get(adapter)
    return entry["count"] if entry is not None and entry["manifest_sha256"] == manifest_sha256 else 0


def record_crash(engine: Engine, adapter: str, manifest_sha256: str) -> None:
    count = count_crashes(engine, adapter, manifest_sha256) + 1
    entry = {"manifest_sha256": manifest_sha256, "count": count}
    engine.load_crashes = {**(engine.load_crashes or {}), adapter: entry}


def forget_crashes(engine: Engine, adapters: Iterable[str]) -> None:
    """Forget the crashes of versions that were loaded."""
    if engine.load_crashes:
        engine.load_crashes = {name: one for name, one in engine.load_crashes.items() if name not in set(adapters)}


def describe_crashes(adapter: str, count: int) -> str:
    return (
        f"the engine ended {count} times while it loaded this version, although its files are intact; it is not loaded "
        f"again until the operator runs `attune versions retry {adapter}`"
    )


async def retry(session: AsyncSession, adapter: str, *, actor: str) -> int:
    """Let the engines load a version again that has ended them. Return how many engines had stopped to load it."""
    query = select(Engine).where(Engine.load_crashes.is_not(None)).order_by(Engine.name).with_for_update()
    engines = [engine for engine in await session.scalars(query) if adapter in (engine.load_crashes or {})]
    for engine in engines:
        forget_crashes(engine, [adapter])
    query_project = select(Policy.project_id).join(Version, Version.policy_id == Policy.id)
    project_id = await session.scalar(query_project.where(Version.adapter_name == adapter))
    if engines and project_id is not None:
        names = [engine.name for engine in engines]
        record_audit(session, actor, AuditAction.VERSION_LOAD_RETRIED, adapter, project_id=project_id, engines=names)
    return len(engines)


def record(engine: Engine, adapter: str, error: str) -> None:
    engine.reason = encode({**read(engine), adapter: error})


def clear(engine: Engine, adapters: Iterable[str]) -> None:
    """Remove the errors of versions that were loaded, or that the engine no longer has to load."""
    if errors := read(engine):
        engine.reason = encode({name: error for name, error in errors.items() if name not in set(adapters)})
