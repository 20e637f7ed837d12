"""`attune pin set | list | remove`: end users, conversations and API keys that are pinned to a version."""

from typing import Annotated, Any

import typer

from app.cli import output
from app.cli.client import Api, CommandError
from app.cli.options import Json, PolicyName, Reason, VersionNumber, drop_unset, parse_version_number, policy_path
from app.cli.output import Column
from app.core.settings import get_settings

pins = typer.Typer(no_args_is_help=True, help="Pin end users, conversations and API keys to one version.")
COLUMNS = (
    Column("id", "id"),
    Column("pinned", lambda row: f"{row['kind']} {row['subject']}"),
    Column("to", "version"),
    Column("loaded", lambda row: "yes" if row["loaded"] else "not yet"),
    Column("by", "created_by"),
    Column("reason", lambda row: row["reason"] or None),
)


@pins.command("set")
def set_pin(
    version: VersionNumber,
    user: Annotated[str | None, typer.Option(help="an end user, as requests name them")] = None,
    conversation: Annotated[str | None, typer.Option(help="a conversation's id")] = None,
    key: Annotated[
        str | None, typer.Option(help="an API key's id, or its prefix as `attune keys list` shows it")
    ] = None,
    reason: Reason = None,
    policy: PolicyName = None,
    json: Json = False,
) -> None:
    """Pin one of them to this version, from the next request on."""
    subjects = drop_unset(user=user, conversation=conversation, key=key and key.removesuffix("…"))
    if len(subjects) != 1:
        raise CommandError("give exactly one of --user, --conversation and --key")
    [(kind, subject)] = subjects.items()
    body = {"kind": kind, "subject": subject, "version": parse_version_number(version), "reason": reason}
    output.print_object(Api(get_settings()).put(_path(policy), body), json, _render)


@pins.command("list")
def list_pins(
    kind: Annotated[str | None, typer.Option(help="conversation, user or key; default: all")] = None,
    policy: PolicyName = None,
    json: Json = False,
) -> None:
    """List the pins of a policy, the newest first."""
    rows = Api(get_settings()).list_all(_path(policy), **drop_unset(kind=kind))
    rows.sort(key=lambda row: row["created_at"], reverse=True)
    output.print_list("pins", COLUMNS, rows, json)


@pins.command("remove")
def remove_pin(
    id: Annotated[str, typer.Argument(help="pin-…, as `attune pin list` shows it")],
    policy: PolicyName = None,
    json: Json = False,
) -> None:
    """Remove a pin: requests get the deployed version again."""
    row = Api(get_settings()).delete(f"{_path(policy)}/{id}")
    output.print_object(row, json, lambda row: f"{row['id']} is removed")


def _path(policy: str | None) -> str:
    return f"{policy_path(policy)}/pins"


def _render(row: dict[str, Any]) -> str:
    suffix = "" if row["loaded"] else "; it is not loaded yet, and serves as soon as it is"
    return f"{row['kind']} {row['subject']} is pinned to {row['version']}{suffix}"
