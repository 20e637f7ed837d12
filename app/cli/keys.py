"""attune keys create | list | revoke, over HTTP; attune projects create | list | key, where the database is."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

import typer
from rich.table import Table
from sqlalchemy.ext.asyncio import AsyncSession

from app.cli import output
from app.cli.client import Api
from app.cli.options import Json
from app.core.database import Database
from app.core.settings import Settings, get_settings
from app.projects import repository, service
from app.projects.schemas import ProjectView

T = TypeVar("T")
keys = typer.Typer(no_args_is_help=True, help="The API keys of your project. Your own key must be an admin's.")
projects = typer.Typer(no_args_is_help=True, help="Projects, made on the machine that holds the database.")


@keys.command("create")
def create_key(
    scope: Annotated[list[str] | None, typer.Option(help="chat, feedback or admin; all of them if unset")] = None,
    name: Annotated[str | None, typer.Option(help="what you call it")] = None,
    expires_in: Annotated[int | None, typer.Option(help="seconds; it lives on if unset")] = None,
    train: Annotated[
        bool | None, typer.Option("--train/--no-train", help="may its turns be learned from? as the project if unset")
    ] = None,
    requests_per_minute: Annotated[int | None, typer.Option(help="the deployment's limit if unset")] = None,
    max_concurrency: Annotated[int | None, typer.Option(help="likewise")] = None,
    json: Json = False,
) -> None:
    """A new key, shown this once."""
    asked = {
        "scopes": scope or None,
        "name": name,
        "expires_in": expires_in,
        "train": train,
        "requests_per_minute": requests_per_minute,
        "max_concurrency": max_concurrency,
    }
    made = Api(get_settings()).post("/v1/keys", {name: value for name, value in asked.items() if value is not None})
    output.as_json(made) if json else typer.echo(made["key"])


@keys.command("list")
def list_keys(json: Json = False) -> None:
    """Every key of your project, the revoked ones too."""
    api, rows = Api(get_settings()), list[dict[str, Any]]()
    page: dict[str, Any] = {"has_more": True}
    while page["has_more"]:
        after = {"after": page["last_id"]} if rows else {}
        page = api.get("/v1/keys", limit=100, **after)
        rows += page["data"]
    output.as_json(rows) if json else output.console.print(_table(rows))


@keys.command("revoke")
def revoke_key(
    id: Annotated[str, typer.Argument(help="key-…, as `attune keys list` shows it")], json: Json = False
) -> None:
    """No request of this key is answered from now on."""
    row = Api(get_settings()).delete(f"/v1/keys/{id}")
    output.as_json(row) if json else typer.echo(f"{row['prefix']}… is revoked")


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="keys")
    for heading in ("id", "name", "key", "scopes", "requests a minute", "at a time", "learns", "state"):
        table.add_column(heading)
    for row in rows:
        limits = (str(row[name] or "–") for name in ("requests_per_minute", "max_concurrency"))
        learns = {None: "as project", True: "yes", False: "no"}[row["train"]]
        scopes = ", ".join(row["scopes"])
        table.add_row(row["id"], row["name"] or "–", f"{row['prefix']}…", scopes, *limits, learns, _state(row))
    return table


def _state(row: dict[str, Any]) -> str:
    if row["revoked_at"] is not None:
        return "revoked"
    if row["expires_at"] is None:
        return "good"
    moment = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["expires_at"]))
    return f"{'expired' if row['expires_at'] <= time.time() else 'until'} {moment}"


@projects.command("create")
def create_project(
    name: str,
    policy: Annotated[str | None, typer.Option(help="its policy's name; ATTUNE_POLICY if unset")] = None,
    model: Annotated[str | None, typer.Option(help="the base it learns on; ATTUNE_MODEL if unset")] = None,
    json: Json = False,
) -> None:
    """A tenant with a policy of its own and an admin key, which is shown this once."""
    settings = get_settings()
    if settings.adaptation == "full":
        raise ValueError("of full weights an engine has one policy's: another project needs a deployment of its own")
    project, key = _on_record(
        settings, lambda s: service.create_project(s, name, policy or settings.policy, model or settings.model)
    )
    made = ProjectView.of(project).model_dump() | {"key": key}
    output.as_json(made) if json else typer.echo(f"project '{name}' ({project.id}), API key (shown this once): {key}")


@projects.command("list")
def list_projects(json: Json = False) -> None:
    """Every project of this deployment."""
    rows = [ProjectView.of(row).model_dump() for row in _on_record(get_settings(), repository.projects)]
    if json:
        output.as_json(rows)
        return
    for row in rows:
        typer.echo(f"{row['name']}  {row['id']}  {'learns' if row['train'] else 'does not learn'}")


@projects.command("key")
def new_admin_key(name: str, json: Json = False) -> None:
    """Another admin key for a project that lost its own, shown this once."""
    key = _on_record(get_settings(), lambda session: service.rescue(session, name))
    output.as_json({"project": name, "key": key}) if json else typer.echo(key)


def _on_record(settings: Settings, work: Callable[[AsyncSession], Awaitable[T]]) -> T:
    async def run() -> T:
        db = Database(settings.database)
        try:
            async with db.write() as session:
                outcome = await work(session)
        finally:
            await db.close()
        return outcome

    return asyncio.run(run())
