"""`attune export | import`: turns, preferences and prompts as Parquet. `attune subject`: the data of one person."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO
from urllib.parse import quote, unquote

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from app.cli.client import Api, CommandError, drop_unset, iterate_lines
from app.cli.options import Json, Yes
from app.cli.output import Row, print_object
from app.cli.vote_import import import_votes

MEDIA_TYPE = "application/vnd.apache.parquet"
CHUNK_BYTES = 1024 * 1024

exports = typer.Typer(no_args_is_help=True, help="Export turns and preferences to Parquet.")
imports = typer.Typer(no_args_is_help=True, help="Import Parquet files as datasets, and files of votes.")
imports.command("votes")(import_votes)
subjects = typer.Typer(no_args_is_help=True, help="Show, export and erase the stored data of a person.")

Out = Annotated[Path, typer.Argument(help="the file to write, e.g. turns.parquet")]
File = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="a Parquet file")]
Name = Annotated[str, typer.Option(help="the dataset's name")]
Policy = Annotated[str | None, typer.Option(help="only this policy")]
Since = Annotated[float | None, typer.Option(help="from this time on (Unix seconds)")]
Until = Annotated[float | None, typer.Option(help="before this time (Unix seconds)")]
SubjectId = Annotated[str, typer.Argument(help='an end user, or a source of feedback, e.g. "HUMAN/user-7"')]


@exports.command("turns")
def export_turns(
    out: Out,
    policy: Policy = None,
    version: Annotated[int | None, typer.Option(help="only this version (its number)")] = None,
    since: Since = None,
    until: Until = None,
    trainable: Annotated[
        bool | None, typer.Option(help="only turns that may be trained on, or only the others")
    ] = None,
    with_feedback: Annotated[bool | None, typer.Option(help="only turns with feedback, or only those without")] = None,
    json: Json = False,
) -> None:
    """Export turns: prompt and reply as text and tokens, log-probs, version, feedback."""
    filters = {"policy": policy, "version": version, "since": since, "until": until}
    filters |= {"trainable": trainable, "with_feedback": with_feedback}
    print_object(_download("/v1/exports/turns", out, **filters), json, _render_export)


@exports.command("preferences")
def export_preferences(
    out: Out, policy: Policy = None, since: Since = None, until: Until = None, json: Json = False
) -> None:
    """Export preference pairs (prompt, chosen, rejected) in TRL's format."""
    result = _download("/v1/exports/preferences", out, policy=policy, since=since, until=until)
    print_object(result, json, _render_export)


@imports.command("prompts")
def import_prompts(file: File, name: Name, json: Json = False) -> None:
    """Import prompts, with an optional `reference` answer each."""
    print_object(_upload(file, name=name, kind="prompts"), json, _render_import)


@imports.command("preferences")
def import_preferences(file: File, name: Name, json: Json = False) -> None:
    """Import preference pairs: rows of `prompt`, `chosen` and `rejected`."""
    print_object(_upload(file, name=name, kind="preferences"), json, _render_import)


def _download(path: str, out: Path, **params: object) -> Row:
    """Download a file. It appears under its name only when it is complete."""
    with Api().stream("GET", path, params=drop_unset(**params)) as response:
        headers = response.headers
        size = int(headers["content-length"])
        with open_atomically(out) as file, _progress_bar() as progress:
            task = progress.add_task(out.name, total=size)
            for chunk in response.iter_bytes(CHUNK_BYTES):
                file.write(chunk)
                progress.advance(task, len(chunk))
    left_out = int(headers.get("x-rows-left-out", 0))
    return {"file": str(out), "bytes": size, "rows": int(headers["x-rows"]), "left_out": left_out}


def _upload(file: Path, **params: object) -> Row:
    headers = {"content-type": MEDIA_TYPE, "content-length": str(file.stat().st_size)}
    options = {"params": params, "headers": headers}
    with (
        _progress_bar() as progress,
        progress.open(file, "rb", description=file.name) as source,
        Api().stream("POST", "/v1/datasets", content=source, **options) as response,
    ):
        response.read()
    columns = [unquote(name) for name in response.headers.get("x-columns-left-out", "").split(",") if name]
    counts = [pair.split("=") for pair in response.headers.get("x-values-left-out", "").split(",") if pair]
    values = {unquote(name): int(count) for name, count in counts}
    left_out = {"columns_left_out": columns, "values_left_out": values}
    return {**response.json(), "new": response.status_code == 201, **left_out}


@contextmanager
def open_atomically(out: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside `out`. Rename it to `out` at the end, or delete it after an error."""
    try:
        handle, name = tempfile.mkstemp(dir=out.absolute().parent, prefix=f".{out.name}.")
    except OSError as error:
        raise CommandError(f"cannot write {out}: {error.strerror}") from error
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.chmod(name, 0o644)
        os.replace(name, out)
    except BaseException:
        os.unlink(name)
        raise


def _progress_bar() -> Progress:
    """Return a progress bar that is shown on a terminal only."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _render_export(result: Row) -> Iterator[str]:
    yield f"{result['file']}: {result['rows']} rows, {result['bytes']} bytes"
    if result["left_out"]:
        yield f"left out: {result['left_out']} pairs that roles and text alone cannot express"


def _render_import(dataset: Row) -> Iterator[str]:
    suffix = "" if dataset["new"] else ", which already existed"
    yield f"{dataset['name']}: {dataset['num_rows']} {dataset['kind']} ({dataset['id']}){suffix}"
    if dataset["columns_left_out"]:
        yield f"left out: columns {', '.join(dataset['columns_left_out'])}, which contain neither text nor numbers"
    for column, count in dataset["values_left_out"].items():
        yield f"left out: {count} values of column {column}, which are not finite numbers or cannot be stored as text"


@subjects.command("show")
def show_subject(id: SubjectId, json: Json = False) -> None:
    """Count the person's rows and list the versions that were trained on them."""
    print_object(Api().get(_subject_path(id)), json, _render_subject)


@subjects.command("export")
def export_subject(
    id: SubjectId,
    out: Annotated[Path | None, typer.Option(help="the file to write; default: standard output")] = None,
) -> None:
    """Export all of the person's data as JSON lines."""
    with Api().stream("GET", f"{_subject_path(id)}/export") as response:
        if out is None:
            for line in iterate_lines(response):
                print(line.decode())
            return
        with open_atomically(out) as file:
            num_lines = 0
            for chunk in response.iter_bytes(CHUNK_BYTES):
                file.write(chunk)
                num_lines += chunk.count(b"\n")
    typer.echo(f"{out}: {num_lines} lines")


@subjects.command("erase")
def erase_subject(
    id: SubjectId,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Delete all of the person's data. Versions that were trained on it are marked, and a rollback is proposed."""
    api, path = Api(), _subject_path(id)
    if not yes:
        body = api.get(path)
        question = f"Erase {body['turns']} turns and {body['feedback']} feedback events permanently?"
        typer.confirm(question, abort=True, err=True)
    print_object(api.delete(path), json, _render_erasure)


def _subject_path(id: str) -> str:
    return f"/v1/subjects/{quote(id, safe='')}"


def _render_subject(body: Row) -> Iterator[str]:
    names = ("turns", "feedback", "rewards", "judgements", "samples", "pins")
    yield ", ".join(f"{body[name]} {name}" for name in names)
    yield from _version_lines(body["versions"])


def _render_erasure(body: Row) -> Iterator[str]:
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


def _version_lines(versions: list[Row]) -> Iterator[str]:
    for row in versions:
        how = "directly" if row["direct"] else "through a parent version"
        yield f"{row['version']} ({row['state']}) was trained on it, {how}"
