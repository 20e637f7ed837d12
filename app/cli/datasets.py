"""attune export turns|preferences, attune import prompts|preferences: Parquet over HTTP."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO
from urllib.parse import unquote

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from app.cli import output
from app.cli.client import Api, Refused
from app.cli.options import Json
from app.core.settings import get_settings

MEDIA_TYPE = "application/vnd.apache.parquet"
PIECE = 1024 * 1024

exports = typer.Typer(no_args_is_help=True, help="What was said and judged, as Parquet.")
imports = typer.Typer(no_args_is_help=True, help="Parquet files as datasets to learn from.")

Out = Annotated[Path, typer.Argument(help="the file to write, e.g. turns.parquet")]
File = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="a Parquet file")]
Name = Annotated[str, typer.Option(help="what the dataset is called")]
Policy = Annotated[str | None, typer.Option(help="of this policy alone")]
Since = Annotated[float | None, typer.Option(help="from this time on (unix seconds)")]
Until = Annotated[float | None, typer.Option(help="before this time (unix seconds)")]


class Files(Api):
    """Downloads and uploads, in pieces."""

    def download(self, path: str, out: Path, **params: Any) -> dict[str, Any]:
        """The file appears under its name when all of it is there, and not before."""
        asked = {name: value for name, value in params.items() if value is not None}
        with self._in_sentences(), self._http.stream("GET", path, params=asked) as response:
            if response.status_code >= 400:
                response.read()
                self._answer(response)
            size = int(response.headers["content-length"])
            with _beside(out) as file, _progress(out.name, size) as step:
                for piece in response.iter_bytes(PIECE):
                    file.write(piece)
                    step(len(piece))
        headers = response.headers
        left_out = int(headers.get("x-rows-left-out", 0))
        return {"file": str(out), "bytes": size, "rows": int(headers["x-rows"]), "left_out": left_out}

    def upload(self, file: Path, **params: Any) -> dict[str, Any]:
        size = file.stat().st_size
        headers = {"content-type": MEDIA_TYPE, "content-length": str(size)}
        with file.open("rb") as source, _progress(file.name, size) as step:
            response = self._send("POST", "/v1/datasets", params=params, headers=headers, content=_read(source, step))
        dataset: dict[str, Any] = self._answer(response)
        left_out = response.headers.get("x-columns-left-out", "")
        columns = [unquote(name) for name in left_out.split(",") if name]
        return {**dataset, "new": response.status_code == 201, "columns_left_out": columns}


@contextmanager
def _beside(out: Path) -> Iterator[BinaryIO]:
    """A file next to `out` that takes its name at the end, or goes away."""
    try:
        handle, name = tempfile.mkstemp(dir=out.absolute().parent, prefix=f".{out.name}.")
    except OSError as error:
        raise Refused(f"cannot write {out}: {error.strerror}") from error
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.chmod(name, 0o644)
        os.replace(name, out)
    except BaseException:
        os.unlink(name)
        raise


def _read(source: BinaryIO, step: Any) -> Iterator[bytes]:
    while piece := source.read(PIECE):
        yield piece
        step(len(piece))


@contextmanager
def _progress(name: str, size: int) -> Iterator[Any]:
    """A bar on a terminal; elsewhere nothing, as the last line says it all."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(name, total=size)
        yield lambda done: bar.advance(task, done)


@exports.command("turns")
def export_turns(
    out: Out,
    policy: Policy = None,
    version: Annotated[int | None, typer.Option(help="of this version alone: its number")] = None,
    since: Since = None,
    until: Until = None,
    trainable: Annotated[
        bool | None, typer.Option(help="only those that may be learned from, or only the rest")
    ] = None,
    with_feedback: Annotated[bool | None, typer.Option(help="only those with feedback, or only those without")] = None,
    json: Json = False,
) -> None:
    """Every turn: prompt and reply in text and in tokens, log-probs, version, feedback."""
    filters = {"policy": policy, "version": version, "since": since, "until": until}
    filters |= {"trainable": trainable, "with_feedback": with_feedback}
    _exported(Files(get_settings()).download("/v1/exports/turns", out, **filters), json)


@exports.command("preferences")
def export_preferences(
    out: Out, policy: Policy = None, since: Since = None, until: Until = None, json: Json = False
) -> None:
    """Pairs of answers, the better and the worse, as preference trainers take them."""
    filters = {"policy": policy, "since": since, "until": until}
    _exported(Files(get_settings()).download("/v1/exports/preferences", out, **filters), json)


@imports.command("prompts")
def import_prompts(file: File, name: Name, json: Json = False) -> None:
    """Prompts, perhaps with a `reference` answer."""
    _imported(Files(get_settings()).upload(file, name=name, kind="prompts"), json)


@imports.command("preferences")
def import_preferences(file: File, name: Name, json: Json = False) -> None:
    """Rows of `prompt`, `chosen` and `rejected`."""
    _imported(Files(get_settings()).upload(file, name=name, kind="preferences"), json)


def _exported(done: dict[str, Any], json: bool) -> None:
    if json:
        output.as_json(done)
        return
    typer.echo(f"{done['file']}: {done['rows']} rows, {done['bytes']} bytes")
    if done["left_out"]:
        typer.echo(f"left out: {done['left_out']} pairs that roles and text alone cannot tell")


def _imported(dataset: dict[str, Any], json: bool) -> None:
    if json:
        output.as_json(dataset)
        return
    known = "" if dataset["new"] else ", which was there before"
    typer.echo(f"{dataset['name']}: {dataset['num_rows']} {dataset['kind']} ({dataset['id']}){known}")
    if dataset["columns_left_out"]:
        typer.echo(f"left out: columns {', '.join(dataset['columns_left_out'])}, which hold neither text nor numbers")
