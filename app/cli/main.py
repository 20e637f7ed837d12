"""The command `attune`: what starts the service, what asks it, and what reads what it wrote."""

import os
import signal
import sys
import time
from typing import Annotated

import typer
import uvicorn

from app.cli import show
from app.cli.analyze import analyze
from app.cli.client import Api
from app.cli.exchange import exports, imports
from app.cli.keys import keys, projects
from app.cli.talk import talk
from app.cli.up import Up, prepare
from app.config import get_settings
from app.metrics import extras
from app.migrate import upgrade

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="The service that production chatbots learn through."
)
Json = Annotated[bool, typer.Option("--json", help="print JSON")]
PolicyName = Annotated[str | None, typer.Option("--policy", help="the policy's name; ATTUNE_POLICY if unset")]


def _become(*command: str) -> None:
    """Run a module of ours, or of torch, in this process's place: signals reach it directly."""
    os.execv(sys.executable, [sys.executable, "-m", *command])


@app.command()
def up() -> None:
    """Everything on this machine: engine, API, workers, trainer. Ctrl-C stops all of it cleanly."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGINT):  # a shell's background job is born with SIGINT ignored
        signal.signal(number, stop)
    extras.require(get_settings().trackers)
    try:
        with Up(get_settings(), typer.echo) as running:
            typer.echo("try `attune chat` in another terminal; ctrl-C stops everything")
            while True:
                running.watch()
                time.sleep(0.5)
    except KeyboardInterrupt:
        pass


@app.command()
def serve() -> None:
    """The API alone."""
    settings = get_settings()
    prepare(settings, typer.echo)
    uvicorn.run(
        "app.main:serve",
        factory=True,
        host=settings.host,
        port=settings.port,
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=10,
        timeout_keep_alive=75,  # clients drop an idle connection after five seconds: at uvicorn's five it is a race
    )


@app.command()
def engine() -> None:
    """One SGLang replica, watched and restarted."""
    prepare(get_settings(), typer.echo)
    _become("workers.engine")


@app.command()
def worker(
    queue: Annotated[
        list[str] | None,
        typer.Option(help="attune (curate, assemble, sweep) or publish (evaluate, publish); both if unset"),
    ] = None,
) -> None:
    """The stations between feedback and versions, as a Celery worker."""
    _become("workers.celery", *(queue or []))


@app.command()
def beat() -> None:
    """The sweep's clock. One per deployment."""
    _become("workers.celery", "beat")


@app.command()
def trainer(
    nproc: Annotated[int | None, typer.Option(help="ranks on this machine; ATTUNE_TRAINER_RANKS if unset")] = None,
) -> None:
    """The trainer's process group, under torchrun: it restarts the group when a rank dies."""
    extras.require(get_settings().trackers)  # torchrun would start it again and again
    ranks = str(nproc or get_settings().trainer_ranks)
    _become(
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        ranks,
        "--max-restarts",
        "1000000",
        "--monitor-interval",
        "1",
        "-m",
        "workers.trainer",
    )


@app.command()
def chat(
    model: Annotated[str | None, typer.Option(help="a policy, or policy@v3; ATTUNE_POLICY if unset")] = None,
    system: Annotated[str | None, typer.Option(help="a system prompt")] = None,
) -> None:
    """Talk to it; judge each reply with a key press."""
    settings = get_settings()
    talk(Api(settings), model or settings.policy, system)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def simulate(context: typer.Context) -> None:
    """Users with hidden tastes, who chat and judge: `attune simulate --help`."""
    _become("demo.simulate", *context.args)


@app.command()
def status(json: Json = False) -> None:
    """What serves, what learns, what waits."""
    body = Api(get_settings()).get("/v1/status")
    show.as_json(body) if json else show.status(body)


@app.command()
def versions(policy: PolicyName = None, json: Json = False) -> None:
    """Every version of a policy, and what people said of it."""
    settings = get_settings()
    rows = Api(settings).get(f"/v1/policies/{policy or settings.policy}/versions")["data"]
    show.as_json(rows) if json else show.console.print(show.versions(rows))


@app.command()
def rollback(
    to: Annotated[int | None, typer.Option(help="the version's number; the serving one's parent if unset")] = None,
    reason: Annotated[str | None, typer.Option(help="kept in the audit log")] = None,
    policy: PolicyName = None,
    json: Json = False,
) -> None:
    """Point back to an older version, and learn on from there."""
    settings = get_settings()
    body = {"version": to, "reason": reason}
    result = Api(settings).post(f"/v1/policies/{policy or settings.policy}/rollback", body)
    show.as_json(result) if json else typer.echo(f"{result['left']} → {result['serving']}")


app.command()(analyze)
app.add_typer(keys, name="keys")
app.add_typer(projects, name="projects")
app.add_typer(exports, name="export")
app.add_typer(imports, name="import")

database = typer.Typer(no_args_is_help=True, help="The database's schema.")
app.add_typer(database, name="db")


@database.command("upgrade")
def db_upgrade() -> None:
    """Run every migration that is missing."""
    settings = get_settings()
    settings.home.mkdir(parents=True, exist_ok=True)
    upgrade(settings.database)


def main() -> None:
    try:
        app()
    except (ValueError, TimeoutError) as error:  # what people can mend
        raise SystemExit(f"attune: {error}") from error


if __name__ == "__main__":
    main()
