"""Create a deployment on the engine that all tests share."""

from typing import Any

from app.cli.client import save_api_key
from app.core.database import Database
from app.core.settings import Settings
from app.models import Engine, EngineState
from app.projects.service import bootstrap
from tests.support.deployment import Harness
from tests.support.engine_fixture import RunningEngine


def engine_keys(engine: RunningEngine) -> dict[str, Any]:
    """Return the settings with the engine's keys."""
    return {"engine": {"api_key": engine.spec.api_key, "admin_key": engine.spec.admin_key}}


async def create_deployment(engine: RunningEngine, settings: Settings, db: Database) -> Harness:
    async with db.write() as session:
        key = await bootstrap(session, settings.policy, settings.model)
        session.add(Engine(name="engine-0", url=engine.spec.url, state=EngineState.READY, incarnation=1, loaded=[]))
    assert key is not None
    save_api_key(settings, key)
    return Harness(settings=settings, db=db, key=key)
