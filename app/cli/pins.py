"""attune pin set | list | remove: who is held on one version."""

from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from app.cli import output
from app.cli.client import Api, Refused
from app.cli.options import Json, Number, PolicyName, Reason, number, path_of
from app.core.settings import get_settings

pins = typer.Typer(no_args_is_help=True, help="Conversations, users and keys that are held on one version.")


@pins.command("set")
def set_pin(
    version: Number,
    user: Annotated[str | None, typer.Option(help="an end user, as requests name them")] = None,
    conversation: Annotated[str | None, typer.Option(help="a conversation's id")] = None,
    key: Annotated[
        str | None, typer.Option(help="an API key's id, or its beginning as `attune keys list` shows it")
    ] = None,
    reason: Reason = None,
    policy: PolicyName = None,
    json: Json = False,
) -> None:
    """Hold one of them on this version, from their next request on."""
    shown = None if key is None else key.removesuffix("…")
    asked = {"user": user, "conversation": conversation, "key": shown}
    named = {kind: subject for kind, subject in asked.items() if subject is not None}
    if len(named) != 1:
        raise Refused("name one of --user, --conversation and --key")
    [(kind, subject)] = named.items()
    body = {"kind": kind, "subject": subject, "version": number(version), "reason": reason}
    row = Api(get_settings()).put(_of(policy), body)
    if json:
        output.as_json(row)
        return
    soon = "" if row["loaded"] else "; it is not loaded yet, and answers as soon as it is"
    typer.echo(f"{row['kind']} {row['subject']} is held on {row['version']}{soon}")


@pins.command("list")
def list_pins(
    kind: Annotated[str | None, typer.Option(help="conversation, user or key; all if unset")] = None,
    policy: PolicyName = None,
    json: Json = False,
) -> None:
    """Every pin of a policy, the latest first."""
    api, rows = Api(get_settings()), list[dict[str, Any]]()
    asked = {"limit": 100} | ({"kind": kind} if kind else {})
    page: dict[str, Any] = {"has_more": True}
    while page["has_more"]:
        page = api.get(_of(policy), **asked, **({"after": page["last_id"]} if rows else {}))
        rows += page["data"]
    rows.sort(key=lambda row: row["created_at"], reverse=True)
    output.as_json(rows) if json else output.console.print(_table(rows))


@pins.command("remove")
def remove_pin(
    id: Annotated[str, typer.Argument(help="pin-…, as `attune pin list` shows it")],
    policy: PolicyName = None,
    json: Json = False,
) -> None:
    """Back to what the pointer says."""
    gone = Api(get_settings()).delete(f"{_of(policy)}/{id}")
    output.as_json(gone) if json else typer.echo(f"{gone['id']} is removed")


def _of(policy: str | None) -> str:
    return f"{path_of(policy)}/pins"


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="pins")
    for heading in ("id", "held", "on", "loaded", "by", "why"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        held = Text(f"{row['kind']} {row['subject']}")
        loaded = "yes" if row["loaded"] else "not yet"
        table.add_row(row["id"], held, row["version"], loaded, row["created_by"], Text(row["reason"] or "–"))
    return table
