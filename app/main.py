"""The API process."""

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from starlette.datastructures import MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app import routes
from app.chat.turn_writer import TurnWriter
from app.core import errors
from app.core.database import Database
from app.core.jobs import TaskSender, make_celery
from app.core.rate_limits import RateLimiter
from app.core.request_timing import Timed
from app.core.services import Services
from app.core.settings import Settings, get_settings
from app.core.telemetry import Telemetry
from app.datasets.upload import ReaderSlots
from app.deployments.router import VersionRouter
from app.feedback.feedback_writer import FeedbackWriter
from app.inference.keys import engine_keys
from app.inference.pool import EnginePool
from app.models import new_id
from app.projects.auth import ApiKeyCache

SETTLE_SECONDS = 3.0  # after uvicorn has waited for ten: the replies it cut then still come home
NUL = errors.BadRequest("The address holds a NUL character, which nothing is named with.", code="invalid_url")
STAINLESS = (
    "arch async custom-poll-interval helper-method lang os package-version poll-helper raw-response read-timeout "
    "retry-count runtime runtime-version timeout"
)
PAGES_MAY_SEND = [
    *("authorization", "content-type", "idempotency-key", "x-conversation-id"),
    *("openai-organization", "openai-project", "user-agent"),
    *(f"x-stainless-{name}" for name in STAINLESS.split()),
]
PAGES_MAY_READ = [
    *("x-request-id", "x-completion-id", "x-conversation-id", "x-policy-version"),
    *("idempotent-replayed", "retry-after", "x-rows", "x-rows-left-out", "x-columns-left-out"),
    *(f"x-ratelimit-{name}-requests" for name in ("limit", "remaining", "reset")),
]


class RequestIds:
    """`x-request-id` on every reply, the failed ones included; no address with NUL goes further, as none is stored.

    What a dependency leaves at `request.state.headers` goes out too, whoever renders the reply.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["request_id"] = new_id("req")

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                state["status"] = message["status"]
                headers = MutableHeaders(raw=list(message.get("headers", [])))
                headers.update({"x-request-id": state["request_id"], **state.get("headers", {})})
                message["headers"] = headers.raw
            await send(message)

        if b"%00" in scope["raw_path"] + b"?" + scope["query_string"]:
            await errors.render(400, NUL.body())(scope, receive, named)
        else:
            await self.app(scope, receive, named)


class Api(FastAPI):
    """Timing, request ids and CORS lie around everything: a failure that nobody foresaw is rendered outside of
    FastAPI's own middlewares, and a page must be able to read that reply as well."""

    def __init__(self, cors_origins: list[str], **options: Any) -> None:
        super().__init__(**options)
        self.cors_origins = cors_origins
        self.services = Services()
        self.services.put(Telemetry())
        self.state.services = self.services

    def build_middleware_stack(self) -> ASGIApp:
        stack: ASGIApp = Timed(RequestIds(super().build_middleware_stack()), self.services.get(Telemetry))
        if not self.cors_origins:
            return stack
        return CORSMiddleware(
            stack,
            allow_origins=self.cors_origins,
            allow_methods=["GET", "POST", "PATCH", "DELETE"],
            allow_headers=PAGES_MAY_SEND,
            expose_headers=PAGES_MAY_READ,
        )


def create_app(settings: Settings) -> Api:
    @asynccontextmanager
    async def lifespan(app: Api) -> AsyncIterator[None]:
        bell = TaskSender(make_celery(settings.broker_url, settings.broker_dir))
        put = app.services.put
        put(settings)
        db = put(Database(settings.database, bell, seconds=settings.database_seconds))
        put(VersionRouter(db, settings.route_cache_seconds))
        put(TurnWriter(db, app.services.get(Telemetry)))
        engines = put(EnginePool(put(engine_keys(settings)), patience=settings.chat_timeout_seconds))
        put(ApiKeyCache(settings.key_cache_seconds))
        put(RateLimiter(settings.limits_url, settings.requests_per_minute, settings.max_concurrency))
        put(FeedbackWriter(db))
        put(ReaderSlots())
        yield
        await app.services.get(TurnWriter).settle(SETTLE_SECONDS)
        await app.services.get(RateLimiter).close()
        await engines.close()
        await db.close()
        bell.close()

    app = Api(
        settings.cors_origins,
        routes=routes.ROUTES,
        title="Attune",
        summary="Chats, feedback and versions of a model that learns online.",
        lifespan=lifespan,
    )
    errors.install(app)
    return app


def serve() -> FastAPI:
    """For uvicorn: `uvicorn --factory app.main:serve`, one app for the whole life of its process."""
    app = create_app(get_settings())
    list(iter_route_contexts(app.routes))  # makes every one ready, which the first requests would wait for
    gc.collect()
    gc.freeze()  # the libraries' objects never die; walking them again and again stops a reply for 100 ms
    return app
