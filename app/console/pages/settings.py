"""Settings: every value that this deployment runs with, and where it comes from. They are changed in the file."""

from dataclasses import dataclass

from fastapi import APIRouter
from starlette.responses import Response

from app.console.access import Admin
from app.console.rendering import render_page
from app.core.settings import Settings
from app.core.settings.loading import SettingsError, load_settings
from app.core.settings.reference import to_toml, values_with_sources
from app.core.settings.tree import printable

router = APIRouter()


@dataclass(frozen=True)
class Value:
    """A setting. `source` is the file's name or a variable's; None for a default."""

    name: str
    variable: str
    value: str
    source: str | None
    description: str


def list_values(settings: Settings, sources: dict[str, str]) -> dict[str, list[Value]]:
    """Return the settings by section. Secrets, and the passwords in URLs, are hidden.

    Args:
        sources: By path, where a value was given.
    """
    sections: dict[str, list[Value]] = {}
    for leaf, value, origins in values_with_sources(settings, sources):
        section, _, name = leaf.path.rpartition(".")
        text = "not set" if value is None else to_toml(printable(leaf.path, value))
        source = ", ".join(origins) or None
        sections.setdefault(section, []).append(Value(name, leaf.variable, text, source, leaf.description))
    return sections


@router.get("/settings")
async def show_settings(visit: Admin) -> Response:
    chosen, names = await visit.choose_policy(None)
    try:
        loaded = load_settings()
        sources, problem = dict(loaded.sources), None
    except SettingsError as error:  # the file was changed since the process began
        sources, problem = {}, str(error)
    return await render_page(
        visit,
        "settings.html",
        "Settings",
        policy=chosen,
        policies=names[:1],
        sections=list_values(visit.settings, sources),
        problem=problem,
    )
