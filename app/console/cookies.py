"""The cookie of a session, and where a browser may sign in.

Over HTTPS the cookie has the prefix `__Host-`: only this host can set it, and it is never sent in clear text. Over
plain HTTP people may sign in on the machine itself alone, where nobody can read along.
"""

from urllib.parse import urlsplit

from fastapi import Request
from starlette.responses import Response

from app.console.sessions import SESSION_SECONDS
from app.core.errors import Forbidden

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
SECURE_NAME, PLAIN_NAME = "__Host-attune", "attune"
INSECURE = (
    "The console signs in over HTTPS, or at http://127.0.0.1 and http://localhost. Open it through an SSH tunnel "
    "(ssh -L 8700:127.0.0.1:8700 HOST), or put a proxy with a certificate in front that sends X-Forwarded-Proto, and "
    "name its address in FORWARDED_ALLOW_IPS."
)
CROSS_SITE = "This form was sent by another site. Open the console itself and try again."


def is_secure(request: Request) -> bool:
    return request.url.scheme == "https"


def cookie_name(request: Request) -> str:
    return SECURE_NAME if is_secure(request) else PLAIN_NAME


def require_safe_transport(request: Request) -> None:
    """Raises Forbidden where the cookie and the key would cross a network in clear text."""
    if not is_secure(request) and request.url.hostname not in LOOPBACK_HOSTS:
        raise Forbidden(INSECURE, code="insecure_transport")


def set_cookie(request: Request, response: Response, token: str) -> None:
    response.set_cookie(
        cookie_name(request),
        token,
        max_age=int(SESSION_SECONDS),
        path="/",
        httponly=True,
        secure=is_secure(request),
        samesite="lax",
    )


def delete_cookie(request: Request, response: Response) -> None:
    response.delete_cookie(cookie_name(request), path="/", httponly=True, secure=is_secure(request), samesite="lax")


def require_same_origin(request: Request) -> None:
    """Raises Forbidden for a request that another site made the browser send.

    Browsers say so in Sec-Fetch-Site; those that do not send it send Origin with every POST.
    """
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is not None:
        is_own = site == "same-origin"
    else:
        is_own = origin is not None and urlsplit(origin).netloc == request.headers.get("host")
    if not is_own:
        raise Forbidden(CROSS_SITE, code="cross_site")
