"""attune subject show|export|erase: what is on record of a person."""

import sys
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from app.cli import output
from app.cli.client import Api
from app.cli.datasets import PIECE, _beside
from app.cli.options import Json
from app.core.settings import get_settings

subjects = typer.Typer(no_args_is_help=True, help="What is on record of a person, and its erasure.")
Id = Annotated[str, typer.Argument(help='an end user, or a source of feedback, e.g. "HUMAN/user-7"')]


class Subjects(Api):
    def download(self, path: str, out: Path | None) -> int:
        """How many lines came; to the terminal when there is no file."""
        with self._in_sentences(), self._http.stream("GET", path) as response:
            if response.status_code >= 400:
                response.read()
                self._answer(response)
            if out is None:
                return sum(sys.stdout.write(f"{line}\n") and 1 for line in response.iter_lines())
            with _beside(out) as file:
                return sum(file.write(piece) and piece.count(b"\n") for piece in response.iter_bytes(PIECE))


@subjects.command("show")
def show_subject(id: Id, json: Json = False) -> None:
    """How much there is of them, and which versions have learned from it."""
    body = Api(get_settings()).get(_at(id))
    if json:
        output.as_json(body)
        return
    names = ("turns", "feedback", "rewards", "judgements", "samples", "pins")
    output.console.print(", ".join(f"{body[name]} {name}" for name in names))
    _learned(body["versions"])


@subjects.command("export")
def export_subject(
    id: Id, out: Annotated[Path | None, typer.Option(help="a file; the terminal if unset")] = None
) -> None:
    """All of it, a line of JSON each."""
    lines = Subjects(get_settings()).download(f"{_at(id)}/export", out)
    if out is not None:
        typer.echo(f"{out}: {lines} lines")


@subjects.command("erase")
def erase_subject(
    id: Id, yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False, json: Json = False
) -> None:
    """Delete all of it, for good. What has learned from it is marked, and a way back shown."""
    api = Api(get_settings())
    if not yes:
        body = api.get(_at(id))
        typer.confirm(f"Erase {body['turns']} turns and {body['feedback']} words for good?", abort=True, err=True)
    done = api.delete(_at(id))
    if json:
        output.as_json(done)
        return
    output.console.print(f"erased: {done['turns']} turns, {done['feedback']} words, {done['rewards']} rewards")
    for batch in done["batches"]:
        output.console.print(f"refused: {batch}, which held some of it")
    _learned(done["versions"])
    for back in done["rollback"]:
        output.console.print(
            f"{back['serving']} serves and has learned from it; the last clean one is {back['clean']}:"
        )
        output.console.print(f"  attune rollback --to {back['version']} --policy {back['policy']}")
    if not done["scrubbed"]:
        output.console.print("the database's files still hold copies: ask again in a moment")


def _at(id: str) -> str:
    return f"/v1/subjects/{quote(id, safe='')}"


def _learned(versions: list[dict[str, Any]]) -> None:
    for row in versions:
        how = "itself" if row["direct"] else "from a version it stands on"
        output.console.print(f"{row['version']} ({row['state']}) has learned from it, {how}")
