"""The application at /console: its pages, its static files, its error pages, and the headers of every response.

It is an application of its own inside the API, because its errors are pages and its clients are browsers. A session
opens these pages alone, never /v1.
"""

import logging

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import InterfaceError, InternalError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.console import sign_in
from app.console.access import SignInRequired
from app.console.pages import annotate, conversation, learning, live, overview, release, settings, versions
from app.console.rendering import FOLDER, render
from app.core.errors import AttuneError, BadRequest, NotFound, database_unavailable, is_database_outage
from app.core.http import Services
from app.core.validation_errors import describe, parameter_name

log = logging.getLogger("attune.console")
PATH = "/console"
HEADERS = {
    "content-security-policy": (
        "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "frame-ancestors 'none'; base-uri 'none'; form-action 'self'; object-src 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
STATIC_SECONDS = 365 * 86_400  # the address of a static file changes with its content
ADVICE = {
    403: "Ask an admin for a key with the role that you need, or sign in with another one.",
    404: "Check the address, or go to the overview and look from there.",
    409: "Somebody, or the service itself, was faster. Load the page again to see what holds now.",
    429: "Wait a minute, then try again.",
    500: "The failure is logged with the request's id below. Tell it to whoever runs the service.",
    503: "Try again in a moment. `attune doctor` says what is wrong with an installation.",
}

_router = APIRouter()
for page in (sign_in, overview, live, conversation, annotate, versions, release, learning, settings):
    _router.include_router(page.router)
ROUTES = _router.routes  # FastAPI prepares them once, on first use, for every app of the process


class SecurityHeaders:
    """Adds the security headers to every response. Pages are not stored; static files are kept for a year."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=list(message.get("headers", [])))
                headers.update(HEADERS)
                is_static = "/static/" in scope["path"] and message["status"] == 200
                stored = f"public, max-age={STATIC_SECONDS}, immutable" if is_static else "no-store"
                headers["cache-control"] = stored
                message["headers"] = headers.raw
            await send(message)

        await self.app(scope, receive, send_with_headers if scope["type"] == "http" else send)


class Console(FastAPI):
    """The application, with the security headers outside of FastAPI's own middleware: errors have them too."""

    def build_middleware_stack(self) -> ASGIApp:
        return SecurityHeaders(super().build_middleware_stack())


def create_console(services: Services) -> Console:
    """Return the application. `services` are those of the API process, which its lifespan adds."""
    console = Console(routes=ROUTES, openapi_url=None, docs_url=None, redoc_url=None)
    console.state.services = services
    console.mount("/static", StaticFiles(directory=FOLDER), name="static")
    _install_error_pages(console)
    return console


def error_page(request: Request, error: AttuneError) -> Response:
    """Return a page that says what is wrong and what to do; a part of a page where htmx asked for one."""
    is_part = "hx-request" in request.headers
    text = render(
        "problem.html" if is_part else "error.html",
        error=error,
        advice=ADVICE.get(error.status, "Correct the form and send it again."),
        request_id=request.state.request_id if error.status >= 500 else None,
    )
    return HTMLResponse(text, error.status, error.headers)


def _install_error_pages(console: FastAPI) -> None:
    @console.exception_handler(SignInRequired)
    async def ask_to_sign_in(request: Request, error: SignInRequired) -> Response:
        path = sign_in.sign_in_path(request)
        if "hx-request" in request.headers:  # a redirect would put the sign-in page into a part of this page
            return Response(status_code=401, headers={"hx-redirect": sign_in.SIGN_IN})
        return RedirectResponse(path, 303)

    @console.exception_handler(AttuneError)
    async def show_attune_error(request: Request, error: AttuneError) -> Response:
        return error_page(request, error)

    @console.exception_handler(RequestValidationError)
    async def show_invalid_parameter(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        param = parameter_name(first)
        return error_page(request, BadRequest(f"The address is wrong: {param}: {describe(first)}.", param=param))

    @console.exception_handler(HTTPException)
    async def show_http_error(request: Request, error: HTTPException) -> Response:
        if error.status_code == 404:
            return error_page(request, NotFound("There is no such page."))
        problem = BadRequest(str(error.detail))
        problem.status = error.status_code
        return error_page(request, problem)

    @console.exception_handler(OperationalError)
    @console.exception_handler(PoolTimeout)
    @console.exception_handler(InterfaceError)
    @console.exception_handler(InternalError)
    async def show_database_error(request: Request, error: SQLAlchemyError) -> Response:
        if not is_database_outage(error):
            raise error
        log.warning("the database failed a request: %s", error)
        return error_page(request, database_unavailable())

    @console.exception_handler(Exception)
    async def show_unexpected_error(request: Request, error: Exception) -> Response:
        return error_page(request, AttuneError("Attune failed on this page.", code="internal"))
