"""The API process: what it holds, and for how long."""

import gc
import weakref

from app.core.database import Database
from app.core.settings import Settings
from app.main import create_app


async def test_an_app_that_ended_is_let_go(settings: Settings) -> None:
    app = create_app(settings)
    async with app.router.lifespan_context(app):
        assert app.services.get(Database)
    held = weakref.ref(app.services.get(Database))
    del app
    gc.collect()
    assert held() is None


def test_routes_are_shared_and_what_an_app_adds_is_its_own(settings: Settings) -> None:
    one, other = create_app(settings), create_app(settings)
    assert len(one.routes) == len(other.routes)
    assert one.openapi()["paths"].keys() == other.openapi()["paths"].keys()
    one.add_api_route("/of-its-own", lambda: None)
    assert "/of-its-own" not in create_app(settings).openapi()["paths"]
