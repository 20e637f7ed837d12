"""`attune raters list | trust | quarantine | block | release`: whose feedback is trained on."""

from typing import Annotated
from urllib.parse import quote

import typer

from app.cli import output
from app.cli.client import Api
from app.cli.options import Json, Reason, drop_unset
from app.cli.output import Column
from app.core.settings import get_settings

Name = Annotated[str, typer.Argument(help='as `attune raters list` shows it, for example "HUMAN/user-7"')]
raters = typer.Typer(no_args_is_help=True, help="Choose whose feedback is trained on. Your key needs the scope admin.")
COLUMNS = (
    Column("rater", "name"),
    Column("standing", "standing"),
    Column("up", "num_up", right=True),
    Column("down", "num_down", right=True),
    Column("weight", "weight", "{:.2f}", right=True),
    Column("reason", lambda row: row["reason"] or None),
)


@raters.command("list")
def list_raters(
    standing: Annotated[str | None, typer.Option(help="normal, trusted, quarantined or blocked; default: all")] = None,
    json: Json = False,
) -> None:
    """List the raters of your project and the weight of their feedback."""
    rows = Api(get_settings()).list_all("/v1/raters", **drop_unset(standing=standing))
    output.print_list("raters", COLUMNS, rows, json)


@raters.command("trust")
def trust(name: Name, reason: Reason = None, json: Json = False) -> None:
    """Never quarantine this rater automatically, and release quarantined samples."""
    _set_standing(name, "trusted", reason, json)


@raters.command("quarantine")
def quarantine(name: Name, reason: Reason = None, json: Json = False) -> None:
    """Quarantine this rater's samples until the rater is released or blocked."""
    _set_standing(name, "quarantined", reason, json)


@raters.command("block")
def block(name: Name, reason: Reason = None, json: Json = False) -> None:
    """Never train on this rater's feedback, and drop quarantined samples."""
    _set_standing(name, "blocked", reason, json)


@raters.command("release")
def release(name: Name, reason: Reason = None, json: Json = False) -> None:
    """Reset this rater to normal, and train on quarantined samples."""
    _set_standing(name, "normal", reason, json)


def _set_standing(name: str, standing: str, reason: str | None, json: bool) -> None:
    row = Api(get_settings()).put(f"/v1/raters/{quote(name)}", drop_unset(standing=standing, reason=reason or None))
    output.print_object(
        row, json, lambda row: f"{row['name']} is {row['standing']}; {row['samples']} samples changed state"
    )
