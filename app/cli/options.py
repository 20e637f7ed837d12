"""What several commands ask for in the same words, and how they read it."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from app.cli.client import Refused
from app.core.settings import get_settings

Json = Annotated[bool, typer.Option("--json", help="print JSON")]
PolicyName = Annotated[str | None, typer.Option("--policy", help="the policy's name; ATTUNE_POLICY if unset")]
Number = Annotated[str, typer.Argument(metavar="VERSION", help="its number, as 12 or v12")]
Reason = Annotated[str | None, typer.Option(help="kept in the audit log")]


def number(told: str) -> int:
    """Example: "v12" -> 12"""
    if not told.removeprefix("v").isdecimal():
        raise typer.BadParameter(f"{told!r} is no version; say 12 or v12")
    return int(told.removeprefix("v"))


def path_of(policy: str | None) -> str:
    """Example: "shop" -> "/v1/policies/shop" """
    return f"/v1/policies/{policy or get_settings().policy}"


def content_of(file: Path) -> Any:
    """Raises Refused for what is no JSON."""
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise Refused(f"{file} is no JSON: {error}") from error
