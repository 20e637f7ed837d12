"""Sign in with an API key or a one-time link, sign out; and the API route that makes such links."""

from typing import Annotated, Literal
from urllib.parse import quote

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import HTMLResponse, RedirectResponse, Response

from app.console import cookies, sessions
from app.console.access import Visit, read_form, visit
from app.console.rendering import render
from app.console.roles import Permission, find_role
from app.console.sessions import LINK_SECONDS
from app.core.database import database_time
from app.core.errors import ERROR_RESPONSES, AttuneError, BadRequest, NotFound, RateLimited
from app.core.http import services_of, settings_of
from app.core.rate_limits import RateLimiter
from app.projects.auth import Caller, DatabaseDep, ViewingCaller, client_network, identify
from app.projects.scopes import has_scope

HOME = "/console/"
SIGN_IN = "/console/sign-in"
ANNOTATE = "/console/annotate"  # the first page of a person who may only label
router = APIRouter()
link_router = APIRouter(prefix="/v1/console", tags=["console"], responses=ERROR_RESPONSES)


class LinkView(BaseModel):
    object: Literal["console.link"] = "console.link"
    url: str = Field(description="signs in to the console once, in any browser, as the key that asked for it")
    expires_at: float


@link_router.post("/links", status_code=201)
async def create_link(request: Request, caller: ViewingCaller, db: DatabaseDep) -> LinkView:
    """Create a link that signs in to the console once, within ten minutes. 404 where the console is off."""
    if not settings_of(request).server.console:
        raise NotFound("The console is off (ATTUNE_SERVER__CONSOLE).", code="console_off")
    async with db.write() as session:
        token = await sessions.create_link(session, caller)
        expires_at = await database_time(session) + LINK_SECONDS
    # The part after # is never sent to a server, so the token is in no log and no Referer.
    return LinkView(url=f"{str(request.base_url).rstrip('/')}{SIGN_IN}#link={token}", expires_at=expires_at)


def safe_target(path: str | None) -> str:
    """Return a page of the console to go to after signing in; the first one for every other address."""
    is_page = path is not None and path.startswith(HOME) and "\\" not in path and not path.startswith(SIGN_IN)
    return path if is_page and path is not None and path.isprintable() else HOME


def sign_in_path(request: Request) -> str:
    """Return the address of the sign-in page that leads back to this request's page."""
    path = request.scope["path"]
    query = request.url.query
    target = safe_target(f"{path}?{query}" if query else path)
    return SIGN_IN if target == HOME or request.method != "GET" else f"{SIGN_IN}?next={quote(target, safe='')}"


@router.get("/sign-in")
async def show_sign_in(
    request: Request, db: DatabaseDep, next: Annotated[str | None, Query(max_length=2000)] = None
) -> Response:
    token = request.cookies.get(cookies.cookie_name(request))
    is_signed_in = token is not None and await sessions.find(db, token) is not None
    return _sign_in_page(safe_target(next), is_signed_in=is_signed_in)


def _sign_in_page(target: str, *, is_signed_in: bool = False, error: AttuneError | None = None) -> Response:
    text = render("sign_in.html", target=target, is_signed_in=is_signed_in, error=error)
    return HTMLResponse(text, 200 if error is None else error.status, {} if error is None else error.headers)


@router.post("/sign-in")
async def sign_in(request: Request, db: DatabaseDep) -> Response:
    """Begin a session with the `key` or the `link` of the form."""
    form = await read_form(request)
    target = safe_target(form.get("next"))
    try:
        cookies.require_same_origin(request)
        cookies.require_safe_transport(request)
        link = form.get("link", "")
        caller = await (_use_link(request, db, link) if link else _identify(request, db, form.get("key", "")))
        find_role(caller.scopes)
        async with db.write() as session:
            token = await sessions.begin(session, caller, how="link" if link else "key")
    except AttuneError as error:
        return _sign_in_page(target, error=error)
    if target == HOME and not has_scope(caller.scopes, Permission.READ):
        target = ANNOTATE
    response = RedirectResponse(target, 303)
    cookies.set_cookie(request, response, token)
    return response


async def _identify(request: Request, db: DatabaseDep, key: str) -> Caller:
    if not key.strip():
        raise BadRequest("Paste an API key; it begins with sk-attune-.", param="key")
    return await identify(request, db, key.strip())


async def _use_link(request: Request, db: DatabaseDep, token: str) -> Caller:
    """Return the caller of a link. Wrong links count as unknown keys do, so that they cannot be tried without limit."""
    limiter, limit = services_of(request).get(RateLimiter), settings_of(request).limits.unknown_keys_per_minute
    address = client_network(request)
    if limiter.is_throttled(address, limit):
        raise RateLimited("Too many wrong keys and links came from your address within a minute.", retry_after=60)
    try:
        return await sessions.use_link(db, token)
    except AttuneError:
        await limiter.count_unknown_key(address, limit)
        raise


@router.post("/sign-out")
async def sign_out(visit: Annotated[Visit, Depends(visit)]) -> Response:
    async with visit.db.write() as session:
        await sessions.end(session, visit.signed_in)
    response = RedirectResponse(SIGN_IN, 303)
    cookies.delete_cookie(visit.request, response)
    return response
