"""`attune console`: sign in to the console in a browser."""

import webbrowser
from typing import Annotated

import typer

from app.cli.client import Api, CommandError
from app.core.settings import Settings

console = typer.Typer(no_args_is_help=True, help="Open the console, the pages at /console.")


def create_link(settings: Settings | None = None) -> str:
    """Return a link that signs in to the console once, within ten minutes. Raises CommandError."""
    return str(Api(settings).post("/v1/console/links", {})["url"])


def describe_console(settings: Settings) -> str:
    """Return a line that says where the console is, with a link that signs in if the service makes one."""
    try:
        return f"console: {create_link(settings)} (signs in once, within ten minutes)"
    except CommandError as error:
        return f"console: no link that signs in; {str(error).removeprefix('attune: ')}"


@console.command("open")
def open_console(
    browser: Annotated[bool, typer.Option("--browser", help="open it in this machine's browser, too")] = False,
) -> None:
    """Print a link that signs in to the console once, within ten minutes, as the API key that this command uses."""
    link = create_link()
    typer.echo(link)
    if browser and not webbrowser.open(link):
        raise CommandError("this machine has no browser that can be started; open the link in another one")
