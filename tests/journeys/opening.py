"""A deployment on the engine that all tests share."""

from typing import Any

from app.cli.client import save_api_key
from app.core.database import Database
from app.core.settings import Settings
from app.models import Engine, EngineState
from app.projects.bootstrap import bootstrap
from tests.support.deployment import Harness
from tests.support.engine_fixture import RunningEngine


def keys(engine: RunningEngine) -> dict[str, Any]:
    """Settings that let it in."""
    return {"engine_api_key": engine.spec.api_key, "engine_admin_key": engine.spec.admin_key}


async def open_on(engine: RunningEngine, settings: Settings, db: Database) -> Harness:
    async with db.write() as session:
        key = await bootstrap(session, settings.policy, settings.model)
        session.add(Engine(name="engine-0", url=engine.spec.url, state=EngineState.READY, incarnation=1, loaded=[]))
    assert key is not None
    save_api_key(settings, key)
    return Harness(settings=settings, db=db, key=key)
