"""`attune config`: write, check and show the settings."""

from pathlib import Path
from typing import Annotated

import typer

from app.cli.up_record import read_running
from app.core.settings import loading, reference
from app.core.settings.derived import trainer_config
from app.ops.start_checks import start_problems

config = typer.Typer(no_args_is_help=True, help="Write, check and show the settings (attune.toml).")


@config.command()
def init(
    file: Annotated[Path, typer.Option(help="the file to write")] = loading.DEFAULT_FILE,
) -> None:
    """Write a file with every setting but the algorithms', its description and its default, each commented out."""
    try:
        with file.open("x", encoding="utf-8") as opened:
            opened.write(reference.template())
    except FileExistsError as error:
        raise ValueError(f"{file} exists already; it was not changed") from error
    typer.echo(f"{file} written; every setting in it has its default until you remove the # before it")


@config.command()
def check(
    settings_only: Annotated[
        bool,
        typer.Option("--settings-only", help="do not check this machine: the settings are for others"),
    ] = False,
) -> None:
    """Say whether the settings are valid and `attune up` could start with them here, with a sentence for each problem.

    Needs no network and starts nothing. The exit status is 1 on a problem.
    """
    loaded = loading.load_settings()
    trainer_config(loaded.settings)
    if not settings_only:
        is_running = read_running(loaded.settings) is not None  # which has its ports
        if problems := [*start_problems(loaded.settings, with_ports=not is_running)]:
            listed = "the settings are valid, but `attune up` cannot start here:\n  " + "\n  ".join(problems)
            raise ValueError(listed if problems[1:] else problems[0])
    from_file = sum(source == str(loaded.file) for source in loaded.sources.values())
    where = f"{from_file} from {loaded.file}" if loaded.file else "no attune.toml here"
    from_environment = len(loaded.sources) - from_file
    typer.echo(f"the settings are valid: {where}, {from_environment} from the environment, the others are defaults")


@config.command()
def show(
    source: Annotated[bool, typer.Option("--source", help="say where each value comes from")] = False,
) -> None:
    """Print the settings with their defaults as TOML, and what applies where one is unset. Secrets are hidden."""
    typer.echo(reference.show(loading.load_settings(), with_sources=source), nl=False)


@config.command("reference", hidden=True)
def print_reference() -> None:
    """Print docs/settings.md."""
    typer.echo(reference.reference(), nl=False)
