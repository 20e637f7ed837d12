"""`attune keys create | list | revoke` over HTTP; `attune projects create | list | key` on the database."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

import typer
from sqlalchemy.ext.asyncio import AsyncSession

from app.cli import output
from app.cli.client import Api
from app.cli.options import Json, drop_unset
from app.cli.output import Column
from app.core.database import Database
from app.core.settings import Settings, get_settings
from app.projects import repository, service
from app.projects.schemas import ProjectView

T = TypeVar("T")
keys = typer.Typer(no_args_is_help=True, help="Manage the API keys of your project. Your key needs the scope admin.")
projects = typer.Typer(no_args_is_help=True, help="Manage projects, on the machine that has the database.")


@keys.command("create")
def create_key(
    scope: Annotated[list[str] | None, typer.Option(help="chat, feedback or admin; default: all")] = None,
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
    body = drop_unset(
        scopes=scope or None,
        name=name,
        expires_in=expires_in,
        train=train,
        requests_per_minute=requests_per_minute,
        max_concurrency=max_concurrency,
    )
    output.print_object(Api(get_settings()).post("/v1/keys", body), json, lambda row: row["key"])


@keys.command("list")
def list_keys(json: Json = False) -> None:
    """List the keys of your project, including revoked ones."""
    output.print_list("keys", KEY_COLUMNS, Api(get_settings()).list_all("/v1/keys"), json)


@keys.command("revoke")
def revoke_key(
    id: Annotated[str, typer.Argument(help="key-…, as `attune keys list` shows it")], json: Json = False
) -> None:
    """Revoke a key: its requests are refused from now on."""
    row = Api(get_settings()).delete(f"/v1/keys/{id}")
    output.print_object(row, json, lambda row: f"{row['prefix']}… is revoked")


def _key_state(row: dict[str, Any]) -> str:
    if row["revoked_at"] is not None:
        return "revoked"
    if row["expires_at"] is None:
        return "active"
    expires_at = output.format_time(row["expires_at"], "%Y-%m-%d %H:%M")
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


@projects.command("create")
def create_project(
    name: str,
    policy: Annotated[str | None, typer.Option(help="the name of its policy; default: ATTUNE_POLICY")] = None,
    model: Annotated[str | None, typer.Option(help="the policy's base model; default: ATTUNE_MODEL")] = None,
    json: Json = False,
) -> None:
    """Create a project with a policy and an admin key. The key is shown this once."""
    settings = get_settings()
    if settings.adaptation == "full":
        raise ValueError(
            "with full weights an engine serves one policy: run a deployment of its own for another project"
        )
    project, key = _run_in_transaction(
        settings, lambda s: service.create_project(s, name, policy or settings.policy, model or settings.model)
    )
    row = ProjectView.of(project).model_dump() | {"key": key}
    output.print_object(row, json, lambda row: f"project '{name}' ({project.id}), API key (shown this once): {key}")


@projects.command("list")
def list_projects(json: Json = False) -> None:
    """List the projects of this deployment."""
    rows = [ProjectView.of(row).model_dump() for row in _run_in_transaction(get_settings(), repository.list_projects)]
    columns = (
        Column("name", "name"),
        Column("id", "id", no_wrap=True),
        Column("trains", lambda row: "yes" if row["train"] else "no"),
    )
    output.print_list("projects", columns, rows, json)


@projects.command("key")
def create_admin_key(name: str, json: Json = False) -> None:
    """Create another admin key for a project. It is shown this once."""
    key = _run_in_transaction(get_settings(), lambda session: service.create_admin_key(session, name))
    output.print_object({"project": name, "key": key}, json, lambda row: row["key"])


def _run_in_transaction(settings: Settings, work: Callable[[AsyncSession], Awaitable[T]]) -> T:
    async def run() -> T:
        db = Database(settings.database)
        try:
            async with db.write() as session:
                result = await work(session)
        finally:
            await db.close()
        return result

    return asyncio.run(run())
