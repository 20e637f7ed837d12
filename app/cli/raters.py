"""attune raters list | trust | hold | block | release: whose feedback is learned from."""

from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.table import Table

from app.cli import output
from app.cli.client import Api
from app.cli.options import Json, Reason
from app.core.settings import get_settings

Name = Annotated[str, typer.Argument(help='as `attune raters list` shows it, for example "HUMAN/user-7"')]
raters = typer.Typer(no_args_is_help=True, help="Whose feedback is learned from. Your key must be an admin's.")


@raters.command("list")
def list_raters(
    standing: Annotated[str | None, typer.Option(help="normal, trusted, held or blocked; all if unset")] = None,
    json: Json = False,
) -> None:
    """Every rater of your project, and how far each is believed."""
    api, rows = Api(get_settings()), list[dict[str, Any]]()
    asked = {"limit": 100} | ({"standing": standing} if standing else {})
    page: dict[str, Any] = {"has_more": True}
    while page["has_more"]:
        page = api.get("/v1/raters", **asked, **({"after": page["last_id"]} if rows else {}))
        rows += page["data"]
    output.as_json(rows) if json else output.console.print(_table(rows))


@raters.command("trust")
def trust(name: Name, reason: Reason = None, json: Json = False) -> None:
    """Never doubted, whatever they say; what was held of theirs is released."""
    _judge(name, "trusted", reason, json)


@raters.command("quarantine")
def quarantine(name: Name, reason: Reason = None, json: Json = False) -> None:
    """What they say waits for a release or a block."""
    _judge(name, "quarantined", reason, json)


@raters.command("block")
def block(name: Name, reason: Reason = None, json: Json = False) -> None:
    """Never learned from; what was held of theirs is dropped."""
    _judge(name, "blocked", reason, json)


@raters.command("release")
def release(name: Name, reason: Reason = None, json: Json = False) -> None:
    """Back to normal, and what was held of theirs is learned from."""
    _judge(name, "normal", reason, json)


def _judge(name: str, standing: str, reason: str | None, json: bool) -> None:
    body = {"standing": standing} | ({"reason": reason} if reason else {})
    row = Api(get_settings()).put(f"/v1/raters/{quote(name)}", body)
    if json:
        output.as_json(row)
    else:
        typer.echo(f"{row['name']} is {row['standing']}; {row['samples']} samples moved")


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="raters")
    for heading in ("rater", "standing", "up", "down", "believed", "why"):
        table.add_column(heading, justify="right" if heading in ("up", "down", "believed") else "left")
    for row in rows:
        counts = str(row["num_up"]), str(row["num_down"])
        table.add_row(row["name"], row["standing"], *counts, f"{row['weight']:.2f}", row["reason"] or "–")
    return table
