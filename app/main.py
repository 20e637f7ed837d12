"""The API process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app import api, errors
from app.config import Settings, get_settings
from app.db import Database
from app.engine.keys import engine_keys
from app.engine.pool import EnginePool
from app.jobs import Bell, make_celery
from app.models import new_id

NUL = errors.BadRequest("The address holds a NUL character, which nothing is named with.", code="invalid_url")


class RequestIds:
    """`x-request-id` on every reply, the failed ones included; no address with NUL goes further, as none is stored."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = new_id("req").encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id)]
            await send(message)

        if b"%00" in scope["raw_path"] + b"?" + scope["query_string"]:
            await errors.render(400, NUL.body())(scope, receive, named)
        else:
            await self.app(scope, receive, named)


def create_app(settings: Settings) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        bell = Bell(make_celery(settings.broker_url, settings.bell_dir))
        app.state.settings = settings
        app.state.db = Database(settings.database, bell)
        app.state.engines = EnginePool(engine_keys(settings), patience=settings.chat_timeout_seconds)
        yield
        await app.state.engines.close()
        await app.state.db.close()
        bell.close()

    app = FastAPI(
        title="Attune",
        summary="Chats, feedback and versions of a model that learns online.",
        lifespan=lifespan,
    )
    errors.install(app)
    api.install(app)
    app.add_middleware(RequestIds)
    return app


def serve() -> FastAPI:
    """For uvicorn: `uvicorn --factory app.main:serve`."""
    return create_app(get_settings())
