"""Pages from templates: the shell around each page, the formats of numbers and times, and the static files."""

import hashlib
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import orjson
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from starlette.responses import HTMLResponse, RedirectResponse, Response

from app.console import sessions
from app.console.access import Visit
from app.console.roles import Permission
from app.models import Policy

FOLDER = Path(__file__).parent / "static"
NAVIGATION = (  # page, path, permission
    ("Overview", "", Permission.READ),
    ("Live", "live", Permission.CONTENT),
    ("Annotate", "annotate", Permission.ANNOTATE),
    ("Versions", "versions", Permission.READ),
    ("Release", "release", Permission.READ),
    ("Learning", "learning", Permission.READ),
    ("Settings", "settings", Permission.ADMINISTER),
)
UNITS = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"))
DASH = "–"


def format_percent(share: float | None, digits: int = 0) -> str:
    return DASH if share is None else f"{100 * share:.{digits}f} %"


def format_number(value: float | None, digits: int = 0) -> str:
    """Example: 1234567 -> "1,234,567"."""
    return DASH if value is None else f"{value:,.{digits}f}"


def format_figure(value: float | None) -> str:
    """Return a measurement with three significant digits. Example: 0.012345 -> "0.0123"."""
    return DASH if value is None else f"{value:.3g}"


def format_seconds(seconds: float | None) -> str:
    """Example: 5400 -> "1.5 h"; 0.25 -> "250 ms"."""
    if seconds is None:
        return DASH
    for size, unit in UNITS:
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def format_ago(at: float | None) -> Markup:
    """Return how long ago a time was, as an element that also holds the time itself."""
    if at is None:
        return Markup(DASH)
    seconds = max(time.time() - at, 0)
    text = "just now" if seconds < 5 else f"{_whole(seconds)} ago"
    iso = datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
    return Markup('<time datetime="{}" title="{}">{}</time>').format(iso, iso.replace("T", " "), text)


def _whole(seconds: float) -> str:
    size, unit = next(((size, unit) for size, unit in UNITS if seconds >= size), (1.0, "s"))
    return f"{seconds // size:.0f} {unit}"


def short_version(name: str | None) -> str:
    """Example: "assistant@v12" -> "v12"."""
    return DASH if name is None else name.rpartition("@")[2]


@cache
def asset_url(name: str) -> str:
    """Return the address of a static file, which changes with its content, so that browsers may keep it."""
    digest = hashlib.sha256((FOLDER / name).read_bytes()).hexdigest()[:12]
    return f"/console/static/{name}?v={digest}"


def to_json(value: object) -> str:
    return orjson.dumps(value).decode()


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("app.console"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Callable[..., Any]] = {
        "percent": format_percent,
        "number": format_number,
        "figure": format_figure,
        "seconds": format_seconds,
        "ago": format_ago,
        "short": short_version,
        "json": to_json,
    }
    environment.filters |= filters
    environment.globals |= {"asset": asset_url}
    return environment


def render(template: str, **values: Any) -> str:
    return _environment().get_template(template).render(**values)


async def render_page(
    visit: Visit,
    template: str,
    page: str,
    *,
    policy: Policy | None = None,
    policies: list[str] | None = None,
    **values: Any,
) -> Response:
    """Return a page inside the shell: navigation, the choice of the policy, and what the last act did.

    Args:
        page: The name of the page in NAVIGATION.
    """
    if visit.signed_in.notice is not None:
        await sessions.set_notice(visit.db, visit.signed_in, None)
    text = render(
        template,
        page=page,
        visit=visit,
        navigation=[(name, path) for name, path, permission in NAVIGATION if visit.may(permission.name)],
        csrf=visit.signed_in.csrf_token,
        policy=policy,
        policies=policies or [],
        **values,
    )
    return HTMLResponse(text)


async def redirect(visit: Visit, path: str, notice: str | None = None) -> Response:
    """Return to a page after an act; the page says what the act did."""
    if notice is not None:
        await sessions.set_notice(visit.db, visit.signed_in, notice)
    return RedirectResponse(path, 303)
