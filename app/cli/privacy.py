"""`attune subject show|export|erase`: the stored data of one person."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from app.cli import output
from app.cli.client import Api
from app.cli.datasets import CHUNK_BYTES, open_atomically
from app.cli.options import Json
from app.core.settings import get_settings

subjects = typer.Typer(no_args_is_help=True, help="Show, export and erase the stored data of a person.")
Id = Annotated[str, typer.Argument(help='an end user, or a source of feedback, e.g. "HUMAN/user-7"')]


class SubjectApi(Api):
    def download_lines(self, path: str, out: Path | None) -> int:
        """Download a JSONL file, or print it if `out` is None. Return the number of lines."""
        with self._stream("GET", path) as response:
            if out is None:
                return sum(sys.stdout.write(f"{line}\n") and 1 for line in response.iter_lines())
            with open_atomically(out) as file:
                return sum(file.write(chunk) and chunk.count(b"\n") for chunk in response.iter_bytes(CHUNK_BYTES))


@subjects.command("show")
def show_subject(id: Id, json: Json = False) -> None:
    """Count the person's rows and list the versions that were trained on them."""
    output.print_object(Api(get_settings()).get(_path(id)), json, _render_subject)


@subjects.command("export")
def export_subject(
    id: Id, out: Annotated[Path | None, typer.Option(help="the file to write; default: standard output")] = None
) -> None:
    """Export all of the person's data as JSON lines."""
    lines = SubjectApi(get_settings()).download_lines(f"{_path(id)}/export", out)
    if out is not None:
        typer.echo(f"{out}: {lines} lines")


@subjects.command("erase")
def erase_subject(
    id: Id, yes: Annotated[bool, typer.Option("--yes", help="do not ask for confirmation")] = False, json: Json = False
) -> None:
    """Delete all of the person's data. Versions that were trained on it are marked, and a rollback is proposed."""
    api = Api(get_settings())
    if not yes:
        body = api.get(_path(id))
        question = f"Erase {body['turns']} turns and {body['feedback']} feedback events permanently?"
        typer.confirm(question, abort=True, err=True)
    output.print_object(api.delete(_path(id)), json, _render_erasure)


def _path(id: str) -> str:
    return f"/v1/subjects/{quote(id, safe='')}"


def _render_subject(body: dict[str, Any]) -> Iterator[str]:
    names = ("turns", "feedback", "rewards", "judgements", "samples", "pins")
    yield ", ".join(f"{body[name]} {name}" for name in names)
    yield from _version_lines(body["versions"])


def _render_erasure(body: dict[str, Any]) -> Iterator[str]:
    yield f"erased: {body['turns']} turns, {body['feedback']} feedback events, {body['rewards']} rewards"
    for batch in body["batches"]:
        yield f"refused: {batch}, which contained some of it"
    yield from _version_lines(body["versions"])
    for option in body["rollback"]:
        ancestor = option["untainted_ancestor"]
        yield f"{option['serving']} serves and was trained on it; the last version that was not is {ancestor}:"
        yield f"  attune rollback --to {option['version']} --policy {option['policy']}"
    if not body["purged"]:
        yield "the database's files still contain copies: repeat the command in a moment"


def _version_lines(versions: list[dict[str, Any]]) -> Iterator[str]:
    for row in versions:
        how = "directly" if row["direct"] else "through a parent version"
        yield f"{row['version']} ({row['state']}) was trained on it, {how}"
