"""The API process: routes, middleware, long-lived services and the FastAPI application."""

import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.routing import iter_route_contexts
from starlette.datastructures import MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.chat.endpoints import router as chat
from app.chat.model_endpoints import router as models
from app.chat.prompts import PromptService
from app.chat.service import ChatService
from app.chat.turn_writer import TurnWriter
from app.console import application as console
from app.console.sign_in import link_router as console_links
from app.core import errors
from app.core.database import Database
from app.core.draining_server import is_draining
from app.core.http import Services, document_json_bodies
from app.core.jobs import TaskSender, make_celery
from app.core.rate_limits import RateLimiter
from app.core.request_log import REQUEST_ID
from app.core.settings import Settings, get_settings
from app.core.telemetry import Telemetry
from app.datasets.endpoints import router as datasets
from app.datasets.imports import ReaderSlots
from app.deployments.endpoints import pin_router as pins
from app.deployments.endpoints import router as deployments
from app.deployments.policy_endpoints import router as policy_changes
from app.deployments.version_router import VersionRouter
from app.environments.endpoints import router as planned_runs
from app.episodes.endpoints import router as episodes
from app.feedback.endpoints import router as feedback
from app.feedback.endpoints import secret_router as token_secrets
from app.feedback.feedback_limits import FeedbackLimits
from app.feedback.feedback_writer import FeedbackWriter
from app.feedback.token_counts import TokenCounter
from app.feedback.vote_endpoints import router as votes
from app.inference.keys import load_engine_keys
from app.inference.pool import EnginePool
from app.langfuse.endpoints import router as langfuse
from app.langfuse.errors import error_body as langfuse_error
from app.langfuse.service import ScoreService
from app.messages.endpoints import router as messages
from app.messages.errors import error_body as messages_error
from app.models import new_id
from app.ops.adapter_files import router as adapter_files
from app.ops.audit import router as audit
from app.ops.endpoints import router as status
from app.ops.event_stream import OpenStreams
from app.ops.event_stream import router as event_stream
from app.ops.metrics import router as metrics
from app.ops.webhook_endpoints import router as webhooks
from app.policies.endpoints import router as policies
from app.policies.endpoints import version_router as version_comparison
from app.privacy.endpoints import router as privacy
from app.privacy.lineage_endpoints import router as lineage
from app.privacy.retention_endpoints import router as retention
from app.projects.auth import ApiKeyCache
from app.projects.endpoints import router as projects
from app.raters.endpoints import router as raters
from app.responses.endpoints import router as responses
from app.training.endpoints import router as training
from app.training.reward_model_endpoints import router as reward_models
from app.training.rollout_endpoints import router as rollouts
from app.turns.endpoints import router as turns

DRAIN_SECONDS = 3.0  # after the server has waited for running replies: the turns of those it cut are still recorded
NUL_IN_URL = errors.BadRequest("The URL holds a NUL character, which no name may contain.", code="invalid_url")
# Headers that OpenAI's generated clients send, without the prefix "x-stainless-".
STAINLESS_HEADERS = (
    "arch async custom-poll-interval helper-method lang os package-version poll-helper raw-response read-timeout "
    "retry-count runtime runtime-version timeout"
)
CORS_REQUEST_HEADERS = [
    *("authorization", "content-type", "idempotency-key", "x-conversation-id"),
    *("x-attune-user", "x-attune-task", "x-attune-episode", "x-attune-agent", "x-attune-state-key", "traceparent"),
    *("x-api-key", "anthropic-version", "anthropic-beta", "anthropic-dangerous-direct-browser-access"),
    *("openai-organization", "openai-project", "user-agent"),
    *(f"x-stainless-{name}" for name in STAINLESS_HEADERS.split()),
]
CORS_RESPONSE_HEADERS = [
    *("x-request-id", "request-id", "x-completion-id", "x-conversation-id", "x-policy-version", "x-attune-sampling"),
    *("idempotent-replayed", "retry-after", "x-rows", "x-rows-left-out", "x-columns-left-out"),
    *(f"x-ratelimit-{name}-requests" for name in ("limit", "remaining", "reset")),
]
ADMIN_ROUTERS = (
    *(audit, training, deployments, lineage, pins, raters),
    *(reward_models, rollouts, privacy, retention, token_secrets, version_comparison, votes, webhooks),
    console_links,
)
# `turns` comes before `feedback`, whose ids would match the path of its search.
APPLICATION_ROUTERS = (
    *(chat, models, responses, messages, planned_runs, episodes, turns, feedback),
    *(policies, policy_changes, projects, datasets),
)
OPERATION_ROUTERS = (status, event_stream, metrics, adapter_files)

_router = APIRouter()
for domain_router in (*ADMIN_ROUTERS, *APPLICATION_ROUTERS, *OPERATION_ROUTERS):
    document_json_bodies(domain_router.routes)
    _router.include_router(domain_router)


async def answer_probe(request: Request) -> Response:
    """Claude Code asks for the root before its first request."""
    return Response()


_router.add_route("/", answer_probe, methods=["HEAD"], include_in_schema=False)
ROUTES = _router.routes  # FastAPI prepares them once, on first use, for every app of the process
document_json_bodies(langfuse.routes)
LANGFUSE_ROUTES = langfuse.routes  # of deployments that take Langfuse's scores


class RequestMiddleware:
    """Adds `x-request-id` to every response, errors included, times requests, and refuses URLs with a NUL character.

    Headers that a dependency leaves at `request.state.headers` are added too, whoever creates the response. While the
    server drains, responses close their connections. A request lasts until the last byte of its response is sent.
    """

    def __init__(self, app: ASGIApp, telemetry: Telemetry) -> None:
        self.app, self._telemetry = app, telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began_at, status, streams = time.perf_counter(), None, False
        route = self._telemetry.timed_route(scope["method"], scope["path"])
        state = scope.setdefault("state", {})
        state["request_id"] = new_id("req")
        REQUEST_ID.set(state["request_id"])  # of this task alone; it also logs an error that leaves the application

        async def send_with_headers(message: Message) -> None:
            nonlocal status, streams
            if streams and route is not None and message["type"] == "http.response.body":
                streams = False  # the first event alone is timed
                self._telemetry.record_first_token(route, time.perf_counter() - began_at)
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(raw=list(message.get("headers", [])))
                headers.update({"x-request-id": state["request_id"], **state.get("headers", {})})
                if is_draining(scope):
                    headers["connection"] = "close"
                streams = headers.get("content-type", "").startswith("text/event-stream")
                message["headers"] = headers.raw
            await send(message)

        has_nul = b"%00" in scope["raw_path"] + b"?" + scope["query_string"]
        app = NUL_IN_URL.response() if has_nul else self.app
        if route is not None:
            self._telemetry.record_begin(route)
        try:
            await app(scope, receive, send_with_headers)
        finally:
            if route is not None:
                self._telemetry.record_request(route, status, time.perf_counter() - began_at)


class Api(FastAPI):
    """The application, with RequestMiddleware and CORS outside of FastAPI's own middleware.

    FastAPI creates the response to an unexpected error outside of its middleware, and browsers must be able to read
    that response, too.
    """

    def __init__(self, cors_origins: list[str], **options: Any) -> None:
        super().__init__(**options)
        self.cors_origins = cors_origins
        self.services = Services()
        self.services.put(Telemetry())
        self.state.services = self.services

    def build_middleware_stack(self) -> ASGIApp:
        stack: ASGIApp = RequestMiddleware(super().build_middleware_stack(), self.services.get(Telemetry))
        if not self.cors_origins:
            return stack
        return CORSMiddleware(
            stack,
            allow_origins=self.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],  # PUT and PATCH are for admins, whose keys belong in no web page
            allow_headers=CORS_REQUEST_HEADERS,
            expose_headers=CORS_RESPONSE_HEADERS,
        )


def create_app(settings: Settings) -> Api:
    """Return the application. Its services exist while its lifespan runs."""

    @asynccontextmanager
    async def lifespan(app: Api) -> AsyncIterator[None]:
        task_sender = TaskSender(make_celery(settings.broker.url, settings.broker_dir))
        put = app.services.put
        put(settings)
        limits = settings.database
        db = put(
            Database(
                settings.database_url,
                task_sender,
                seconds=limits.request_timeout_seconds,
                long_seconds=limits.long_timeout_seconds,
            )
        )
        router = put(VersionRouter(db, settings.server.route_cache_seconds))
        writer = put(TurnWriter(db, app.services.get(Telemetry)))
        engines = put(EnginePool(put(load_engine_keys(settings)), read_timeout=settings.server.chat_timeout_seconds))
        put(ChatService(db, router, writer, engines, settings))
        put(PromptService(router, engines, settings))
        put(ApiKeyCache(settings.server.key_cache_seconds))
        put(RateLimiter(settings.limits.url, settings.limits.requests_per_minute, settings.limits.max_concurrency))
        feedback_writer = put(FeedbackWriter(db, FeedbackLimits.from_settings(settings)))
        put(ScoreService(db, feedback_writer, app.services.get(Telemetry), settings.langfuse))
        put(TokenCounter(db))
        put(ReaderSlots())
        put(OpenStreams())
        yield
        await writer.drain(DRAIN_SECONDS)
        await app.services.get(RateLimiter).close()
        await engines.close()
        await db.close()
        task_sender.close()

    app = Api(
        settings.server.cors_origins,
        routes=[*ROUTES, *LANGFUSE_ROUTES] if settings.langfuse.intake else ROUTES,
        title="Attune",
        summary="Chats, feedback and versions of a model that learns online.",
        lifespan=lifespan,
    )
    errors.install_error_handlers(app, {messages.prefix: messages_error, langfuse.prefix: langfuse_error})
    if settings.server.console:
        app.mount(console.PATH, console.create_console(app.services))
    return app


def serve() -> FastAPI:
    """Return the application for `uvicorn --factory app.main:serve`, one per process."""
    app = create_app(get_settings())
    list(iter_route_contexts(app.routes))  # prepares the routes, so that the first requests need not wait
    app.openapi()  # half a second, during which the event loop would stand still
    gc.collect()
    gc.freeze()  # the libraries' objects stay alive; collecting them again would pause replies for 100 ms
    return app
