"""`attune keys | raters` over HTTP, and `attune projects` on the database."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar
from urllib.parse import quote

import typer
from sqlalchemy.ext.asyncio import AsyncSession

from app.cli.client import Api, drop_unset
from app.cli.options import Json, Reason
from app.cli.output import Column, Row, format_time, print_list, print_object
from app.core.database import Database
from app.core.project_limits import ProjectLimits
from app.core.settings import Settings, get_settings
from app.models import Project
from app.projects import service
from app.projects.views import ProjectView

T = TypeVar("T")
keys = typer.Typer(no_args_is_help=True, help="Manage the API keys of your project. Your key needs the scope admin.")
raters = typer.Typer(
    no_args_is_help=True, help="Choose whose feedback is trained on. Your key needs the scope operator."
)
projects = typer.Typer(no_args_is_help=True, help="Manage projects, on the machine that has the database.")
RaterName = Annotated[str, typer.Argument(help='as `attune raters list` shows it, for example "HUMAN/user-7"')]


@keys.command("create")
def create_key(
    scope: Annotated[
        list[str] | None,
        typer.Option(
            help="chat, feedback, feedback:programs, viewer, viewer:content, annotator, operator or admin; may be "
            "given more than once; default: everything"
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="a name for the key")] = None,
    expires_in: Annotated[int | None, typer.Option(help="seconds until it expires; default: never")] = None,
    train: Annotated[
        bool | None,
        typer.Option("--train/--no-train", help="whether its turns may be trained on; default: as the project"),
    ] = None,
    requests_per_minute: Annotated[int | None, typer.Option(help="default: the deployment's limit")] = None,
    max_concurrency: Annotated[int | None, typer.Option(help="default: the deployment's limit")] = None,
    json: Json = False,
) -> None:
    """Create an API key. It is shown this once."""
    limits = {"requests_per_minute": requests_per_minute, "max_concurrency": max_concurrency}
    body = drop_unset(scopes=scope or None, name=name, expires_in=expires_in, train=train, **limits)
    print_object(Api().post("/v1/keys", body), json, lambda row: row["key"])


@keys.command("rotate-token-secret")
def rotate_token_secret(
    end_tokens: Annotated[bool, typer.Option("--end-tokens", help="end all browser tokens at once")] = False,
    json: Json = False,
) -> None:
    """Sign new browser tokens with a new secret. Tokens that exist stay valid until they expire."""
    view = Api().post("/v1/feedback/tokens/rotate-secret", {"end_tokens": end_tokens})
    ended = "all browser tokens have ended" if end_tokens else "browser tokens that exist stay valid until they expire"
    print_object(view, json, lambda row: f"new browser tokens have a new secret; {ended}")


@keys.command("list")
def list_keys(json: Json = False) -> None:
    """List the keys of your project, including revoked ones."""
    print_list("keys", KEY_COLUMNS, Api().list_all("/v1/keys"), json)


@keys.command("revoke")
def revoke_key(
    id: Annotated[str, typer.Argument(help="key-…, as `attune keys list` shows it")], json: Json = False
) -> None:
    """Revoke a key: its requests are refused from now on."""
    print_object(Api().delete(f"/v1/keys/{id}"), json, lambda row: f"{row['prefix']}… is revoked")


def _key_state(row: Row) -> str:
    if row["revoked_at"] is not None:
        return "revoked"
    if row["expires_at"] is None:
        return "active"
    expires_at = format_time(row["expires_at"], "%Y-%m-%d %H:%M")
    return f"{'expired' if row['expires_at'] <= time.time() else 'until'} {expires_at}"


KEY_COLUMNS = (
    Column("id", "id"),
    Column("name", lambda row: row["name"] or None),
    Column("key", "prefix", "{}…"),
    Column("scopes", lambda row: ", ".join(row["scopes"])),
    Column("requests a minute", lambda row: row["requests_per_minute"] or None),
    Column("concurrent", lambda row: row["max_concurrency"] or None),
    Column("trains", lambda row: {None: "as project", True: "yes", False: "no"}[row["train"]]),
    Column("state", _key_state),
)
RATER_COLUMNS = (
    Column("rater", "name"),
    Column("standing", "standing"),
    Column("up", "num_up", right=True),
    Column("down", "num_down", right=True),
    Column("weight", "weight", "{:.2f}", right=True),
    Column("reason", lambda row: row["reason"] or None),
)
PROJECT_COLUMNS = (
    Column("name", "name"),
    Column("id", "id", no_wrap=True),
    Column("trains", lambda row: "yes" if row["train"] else "no"),
)


@raters.command("list")
def list_raters(
    standing: Annotated[str | None, typer.Option(help="normal, trusted, quarantined or blocked; default: all")] = None,
    json: Json = False,
) -> None:
    """List the raters of your project and the weight of their feedback."""
    print_list("raters", RATER_COLUMNS, Api().list_all("/v1/raters", standing=standing), json)


@raters.command("trust")
def trust_rater(name: RaterName, reason: Reason = None, json: Json = False) -> None:
    """Never quarantine this rater automatically, and release quarantined samples."""
    _set_standing(name, "trusted", reason, json)


@raters.command("quarantine")
def quarantine_rater(name: RaterName, reason: Reason = None, json: Json = False) -> None:
    """Quarantine this rater's samples until the rater is released or blocked."""
    _set_standing(name, "quarantined", reason, json)


@raters.command("block")
def block_rater(name: RaterName, reason: Reason = None, json: Json = False) -> None:
    """Never train on this rater's feedback, and drop quarantined samples."""
    _set_standing(name, "blocked", reason, json)


@raters.command("release")
def release_rater(name: RaterName, reason: Reason = None, json: Json = False) -> None:
    """Reset this rater to normal, and train on quarantined samples."""
    _set_standing(name, "normal", reason, json)


def _set_standing(name: str, standing: str, reason: str | None, json: bool) -> None:
    row = Api().put(f"/v1/raters/{quote(name)}", {"standing": standing, "reason": reason or None})
    print_object(row, json, lambda row: f"{row['name']} is {row['standing']}; {row['samples']} samples changed state")


@projects.command("create")
def create_project(
    name: str,
    policy: Annotated[str | None, typer.Option(help="the name of its policy; default: ATTUNE_POLICY")] = None,
    model: Annotated[str | None, typer.Option(help="the policy's base model; default: ATTUNE_MODEL")] = None,
    json: Json = False,
) -> None:
    """Create a project with a policy and an admin key. The key is shown this once."""
    settings = get_settings()
    if settings.trainer.adaptation == "full":
        raise ValueError(
            "with full weights an engine serves one policy: run a deployment of its own for another project"
        )
    project, key = run_in_transaction(
        settings, lambda s: service.create_project(s, name, policy or settings.policy, model or settings.model)
    )
    row = ProjectView.of(project, settings).model_dump() | {"key": key}
    print_object(row, json, lambda row: f"project '{name}' ({project.id}), API key (shown this once): {key}")


@projects.command("list")
def list_projects(json: Json = False) -> None:
    """List the projects of this deployment."""
    settings = get_settings()
    rows = run_in_transaction(settings, service.list_projects)
    print_list("projects", PROJECT_COLUMNS, [ProjectView.of(row, settings).model_dump() for row in rows], json)


@projects.command("limits")
def set_limits(
    name: str,
    limit: Annotated[
        list[str] | None,
        typer.Option(help='for example "pins=100" or "output_tokens_per_day=none"; may be given more than once'),
    ] = None,
    json: Json = False,
) -> None:
    """Show the limits of a project in force, or set some. They can only be lower than the deployment's."""
    settings = get_settings()
    limits = ProjectLimits.model_validate(dict(map(_parse_limit, limit or [])))

    async def change(session: AsyncSession) -> Project:
        project = await service.find_project(session, name)
        if project is None:
            raise ValueError(f"there is no project '{name}'")
        return await service.set_limits(session, project.id, limits, actor="operator")

    view = ProjectView.of(run_in_transaction(settings, change), settings).model_dump()
    lines = [f"{key}: {'no limit' if value is None else value}" for key, value in view["limits"].items()]
    print_object(view, json, lambda row: "\n".join(lines))


def _parse_limit(text: str) -> tuple[str, int | None]:
    """Parse "NAME=NUMBER" or "NAME=none". Anything else must not remove a limit."""
    name, _, value = text.partition("=")
    if value == "none":
        return name, None
    if not (value.isascii() and value.isdigit()):
        raise ValueError(f'"{text}" is no limit: it must be NAME=NUMBER, in digits only, or NAME=none')
    return name, int(value)


@projects.command("key")
def create_admin_key(name: str, json: Json = False) -> None:
    """Create another admin key for a project. It is shown this once."""
    key = run_in_transaction(get_settings(), lambda session: service.create_admin_key(session, name))
    print_object({"project": name, "key": key}, json, lambda row: row["key"])


def run_in_transaction(settings: Settings, work: Callable[[AsyncSession], Awaitable[T]]) -> T:
    """Run a coroutine function in one transaction of the deployment's database."""

    async def run() -> T:
        async with Database(settings.database_url) as db, db.write() as session:
            result = await work(session)
        return result

    return asyncio.run(run())
