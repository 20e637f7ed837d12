"""`attune backup`: back up the database and the version files of a running deployment, verify and restore a backup."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from sqlalchemy.exc import DBAPIError

from app.cli.client import CommandError
from app.cli.options import Json
from app.cli.output import Row, format_time, print_object
from app.core.encryption import CLEAR_TEXT
from app.core.settings import get_settings
from app.ops import backup
from app.ops.backup_connections import one_line
from app.ops.backup_manifest import BackupManifest, Report

LINE_SECONDS = 5.0  # between two lines of progress where there is no terminal
backups = typer.Typer(no_args_is_help=True, help="Back up, verify and restore the deployment of this machine.")
Folder = Annotated[Path, typer.Argument(help="the folder of the backup")]


@backups.command("create")
def create_backup(
    folder: Annotated[Path, typer.Argument(help="the folder to create, e.g. backups/2026-11-23")],
    incomplete: Annotated[
        bool, typer.Option("--incomplete", help="also if files of a version in use are missing or damaged")
    ] = False,
    json: Json = False,
) -> None:
    """Copy the database and the files that it names into a new folder, while the service runs."""
    began = time.monotonic()
    with _progress() as report:
        manifest = backup.create_backup(get_settings(), folder, report, incomplete=incomplete)
    row = _summary(folder, manifest) | {"seconds": round(time.monotonic() - began, 1)}
    print_object(row, json, _render)


@backups.command("verify")
def verify_backup(folder: Folder, json: Json = False) -> None:
    """Check the hash of every file, and that each version has its files. The exit status is 1 if something is wrong."""
    with _progress() as report:
        manifest, problems = backup.verify_backup(folder, report)
    print_object(_summary(folder, manifest) | {"problems": problems}, json, _render)
    if problems:
        raise typer.Exit(1)


@backups.command("restore")
def restore_backup(folder: Folder, json: Json = False) -> None:
    """Restore into ATTUNE_HOME and ATTUNE_DATABASE__URL, which must be empty, after verifying the backup."""
    with _progress() as report:
        manifest = backup.restore_backup(get_settings(), folder, report)
    row = _summary(folder, manifest) | {"missing_keys": backup.find_missing_keys(get_settings(), manifest)}
    print_object(row, json, lambda row: [*_render(row), *_render_missing_keys(row), "restored; `attune up` serves it"])


def _render_missing_keys(row: Row) -> Iterator[str]:
    if row["missing_keys"]:
        yield (
            f"webhooks cannot be signed: the encryption key {', '.join(row['missing_keys'])} is not here. Copy "
            f"encryption.key of the original deployment to {get_settings().encryption_file}, or set "
            "ATTUNE_DATABASE__ENCRYPTION_KEYS; without the key, give each webhook a new secret "
            "(attune webhooks rotate-secret)"
        )


def _summary(folder: Path, manifest: BackupManifest) -> Row:
    contents = manifest.contents
    return {
        "folder": str(folder),
        "created_at": manifest.created_at,
        "bytes": manifest.num_bytes,
        "database": manifest.database,
        "schema_revision": contents.schema_revision,
        "rows": contents.rows,
        "artifacts": len(contents.artifacts) - len(manifest.absent),
        "absent": manifest.absent,
        "base_models": contents.base_models,
        "webhook_secrets": contents.webhook_secrets,
    }


def _render(row: Row) -> Iterator[str]:
    rows = row["rows"]
    counts = ", ".join(f"{rows[name]} {name}" for name in ("turns", "feedback", "versions"))
    took = f" in {row['seconds']} s" if "seconds" in row else ""
    yield f"{row['folder']}: {row['bytes'] / 1e6:.1f} MB of {format_time(row['created_at'])}{took}"
    yield f"{row['database']}, schema {row['schema_revision']}: {counts}; {row['artifacts']} folders of files"
    base_models = f"the base model ({', '.join(row['base_models'])}), " if row["base_models"] else ""
    yield f"not in it: {base_models}the settings and the encryption keys"
    for key, count in row["webhook_secrets"].items():
        how = "in clear text" if key == CLEAR_TEXT else f"encrypted with the key {key}"
        yield f"signing secrets of webhooks: {count} {how}"
    for path, reason in row["absent"].items():
        yield f"  not in it: {path}: {reason}"
    for problem in row.get("problems", ()):
        yield f"  {problem}"
    if row.get("problems") == []:
        yield "every file is intact"


@contextmanager
def _progress() -> Iterator[Report]:
    """Yield a function that shows progress on stderr: a bar on a terminal, otherwise a line every few seconds."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    last_line_at = time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def report(what: str, done: int, total: int | None) -> None:
            nonlocal last_line_at
            bar.update(task, description=what, completed=done, total=total)
            if not console.is_terminal and time.monotonic() - last_line_at >= LINE_SECONDS:
                last_line_at = time.monotonic()
                typer.echo(f"{what}: {done / 1e6:.0f} MB{f' of {total / 1e6:.0f} MB' if total else ''}", err=True)

        try:
            yield report
        except OSError as error:
            raise CommandError(f"{error.filename or 'the backup'}: {error.strerror or error}") from error
        except (sqlite3.Error, DBAPIError) as error:
            message = f"the database cannot be used: {one_line(error)}; check ATTUNE_DATABASE__URL and ATTUNE_HOME"
            raise CommandError(message) from error
