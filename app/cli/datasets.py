"""`attune export turns|preferences` and `attune import prompts|preferences`: Parquet files over HTTP."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO
from urllib.parse import unquote

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from app.cli import output
from app.cli.client import Api, CommandError
from app.cli.options import Json, drop_unset
from app.core.settings import get_settings

MEDIA_TYPE = "application/vnd.apache.parquet"
CHUNK_BYTES = 1024 * 1024

exports = typer.Typer(no_args_is_help=True, help="Export turns and preferences to Parquet.")
imports = typer.Typer(no_args_is_help=True, help="Import Parquet files as datasets.")

Out = Annotated[Path, typer.Argument(help="the file to write, e.g. turns.parquet")]
File = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="a Parquet file")]
Name = Annotated[str, typer.Option(help="the dataset's name")]
Policy = Annotated[str | None, typer.Option(help="only this policy")]
Since = Annotated[float | None, typer.Option(help="from this time on (Unix seconds)")]
Until = Annotated[float | None, typer.Option(help="before this time (Unix seconds)")]


class DatasetApi(Api):
    """Downloads and uploads files in chunks."""

    def download(self, path: str, out: Path, **params: Any) -> dict[str, Any]:
        """Download a file. It appears under its name only when it is complete."""
        with self._stream("GET", path, params=drop_unset(**params)) as response:
            size = int(response.headers["content-length"])
            with open_atomically(out) as file, _progress_bar(out.name, size) as advance:
                for chunk in response.iter_bytes(CHUNK_BYTES):
                    file.write(chunk)
                    advance(len(chunk))
        headers = response.headers
        left_out = int(headers.get("x-rows-left-out", 0))
        return {"file": str(out), "bytes": size, "rows": int(headers["x-rows"]), "left_out": left_out}

    def upload(self, file: Path, **params: Any) -> dict[str, Any]:
        size = file.stat().st_size
        headers = {"content-type": MEDIA_TYPE, "content-length": str(size)}
        with file.open("rb") as source, _progress_bar(file.name, size) as advance:
            content = _read_chunks(source, advance)
            response = self._send("POST", "/v1/datasets", params=params, headers=headers, content=content)
        dataset: dict[str, Any] = self._parse_response(response)
        left_out = response.headers.get("x-columns-left-out", "")
        columns = [unquote(name) for name in left_out.split(",") if name]
        return {**dataset, "new": response.status_code == 201, "columns_left_out": columns}


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


def _read_chunks(source: BinaryIO, advance: Callable[[int], None]) -> Iterator[bytes]:
    while chunk := source.read(CHUNK_BYTES):
        yield chunk
        advance(len(chunk))


@contextmanager
def _progress_bar(name: str, size: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal, and nothing elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda num_bytes: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(name, total=size)
        yield lambda num_bytes: bar.advance(task, num_bytes)


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
    result = DatasetApi(get_settings()).download("/v1/exports/turns", out, **filters)
    output.print_object(result, json, _render_export)


@exports.command("preferences")
def export_preferences(
    out: Out, policy: Policy = None, since: Since = None, until: Until = None, json: Json = False
) -> None:
    """Export preference pairs (prompt, chosen, rejected) in TRL's format."""
    filters = {"policy": policy, "since": since, "until": until}
    result = DatasetApi(get_settings()).download("/v1/exports/preferences", out, **filters)
    output.print_object(result, json, _render_export)


@imports.command("prompts")
def import_prompts(file: File, name: Name, json: Json = False) -> None:
    """Import prompts, with an optional `reference` answer each."""
    dataset = DatasetApi(get_settings()).upload(file, name=name, kind="prompts")
    output.print_object(dataset, json, _render_import)


@imports.command("preferences")
def import_preferences(file: File, name: Name, json: Json = False) -> None:
    """Import preference pairs: rows of `prompt`, `chosen` and `rejected`."""
    dataset = DatasetApi(get_settings()).upload(file, name=name, kind="preferences")
    output.print_object(dataset, json, _render_import)


def _render_export(result: dict[str, Any]) -> Iterator[str]:
    yield f"{result['file']}: {result['rows']} rows, {result['bytes']} bytes"
    if result["left_out"]:
        yield f"left out: {result['left_out']} pairs that roles and text alone cannot express"


def _render_import(dataset: dict[str, Any]) -> Iterator[str]:
    suffix = "" if dataset["new"] else ", which already existed"
    yield f"{dataset['name']}: {dataset['num_rows']} {dataset['kind']} ({dataset['id']}){suffix}"
    if dataset["columns_left_out"]:
        yield f"left out: columns {', '.join(dataset['columns_left_out'])}, which contain neither text nor numbers"
