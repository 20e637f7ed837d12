"""Options and arguments that several commands share, and functions that parse them."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from app.cli.client import CommandError
from app.core.settings import get_settings

Json = Annotated[bool, typer.Option("--json", help="print JSON")]
PolicyName = Annotated[str | None, typer.Option("--policy", help="the policy's name; default: ATTUNE_POLICY")]
VersionNumber = Annotated[str, typer.Argument(metavar="VERSION", help="a version number, as 12 or v12")]
Yes = Annotated[bool, typer.Option("--yes", help="do not ask for confirmation")]
Reason = Annotated[str | None, typer.Option(help="a note for the audit log")]
Home = Annotated[Path | None, typer.Option(help="the service's folder; default: ATTUNE_HOME, or .attune")]
JsonFile = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="a JSON file")]


def parse_version_number(text: str) -> int:
    """Example: "v12" -> 12"""
    if not text.removeprefix("v").isdecimal():
        raise typer.BadParameter(f"{text!r} is not a version number; write 12 or v12")
    return int(text.removeprefix("v"))


def policy_path(policy: str | None, path: str = "") -> str:
    """Example: ("shop", "/pins") -> "/v1/policies/shop/pins" """
    return f"/v1/policies/{policy or get_settings().policy}{path}"


def parse_json(text: str, source: str) -> Any:
    """Parse JSON. `source` names the option or file in the error message."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise CommandError(f"{source} is not valid JSON: {error}") from error
