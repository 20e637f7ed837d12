"""The command `attune`: what starts the service, what asks it, and what reads what it wrote."""

import os
import signal
import sys
import time
from typing import Annotated

import typer
import uvicorn

from app.cli import output
from app.cli.analyze import analyze
from app.cli.chat import talk
from app.cli.client import Api
from app.cli.datasets import exports, imports
from app.cli.deployments import canary, delivery, deploy, shadow
from app.cli.keys import keys, projects
from app.cli.options import Json, PolicyName, number, path_of
from app.cli.pins import pins
from app.cli.raters import raters
from app.cli.reward_models import models
from app.cli.rollouts import rollouts
from app.cli.subjects import subjects
from app.cli.training import audit, rewards, train
from app.cli.up import Up, prepare
from app.core.migrate import upgrade
from app.core.settings import get_settings
from app.ops import tracker_packages

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="The service that production chatbots learn through."
)


def _become(*command: str) -> None:
    """Run a module of ours, or of torch, in this process's place: signals reach it directly."""
    os.execv(sys.executable, [sys.executable, "-m", *command])


@app.command()
def up() -> None:
    """Everything on this machine: engine, API, workers, trainer. Ctrl-C stops all of it cleanly."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    for sign in (signal.SIGTERM, signal.SIGINT):  # a shell's background job is born with SIGINT ignored
        signal.signal(sign, stop)
    tracker_packages.require(get_settings().trackers)
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
        typer.Option(
            help="attune (curate, assemble, sweep), judge, rollout, or publish (evaluate, publish); all if unset"
        ),
    ] = None,
) -> None:
    """The stations between feedback and versions, as a Celery worker."""
    _become("workers.celery_app", *(queue or []))


@app.command()
def beat() -> None:
    """The sweep's clock. One per deployment."""
    _become("workers.celery_app", "beat")


@app.command()
def trainer(
    nproc: Annotated[int | None, typer.Option(help="ranks on this machine; ATTUNE_TRAINER_RANKS if unset")] = None,
    nnodes: Annotated[str, typer.Option(help="hosts, or fewest:most; with more than one, an endpoint is needed")] = "1",
    rdzv_endpoint: Annotated[
        str | None, typer.Option(help="HOST:PORT where hosts meet: one of them, the same in every host's command")
    ] = None,
    rdzv_id: Annotated[str, typer.Option(help="the group's name at that endpoint")] = "attune-trainer",
    patience: Annotated[
        float, typer.Option(min=1, help="seconds that a rank may not answer the others before the group starts anew")
    ] = 300.0,
) -> None:
    """The trainer's process group, under torchrun: it restarts the group when a rank dies or hangs."""
    tracker_packages.require(get_settings().trackers)  # torchrun would start it again and again
    if nnodes != "1" and rdzv_endpoint is None:
        raise ValueError("--nnodes needs --rdzv-endpoint HOST:PORT, the same on every host")
    meeting = ["--standalone"]
    if rdzv_endpoint is not None:
        meeting = ["--nnodes", nnodes, "--rdzv-backend", "c10d"]
        meeting += ["--rdzv-endpoint", rdzv_endpoint, "--rdzv-id", rdzv_id]
    ranks = ["--nproc-per-node", str(nproc or get_settings().trainer_ranks)]
    _become(
        "workers.training.watchdog",
        str(patience),
        *meeting,
        *ranks,
        "--max-restarts",
        "1000000",
        "--monitor-interval",
        "1",
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
    output.as_json(body) if json else output.status(body)


@app.command()
def versions(policy: PolicyName = None, json: Json = False) -> None:
    """Every version of a policy, and what people said of it."""
    settings = get_settings()
    rows = Api(settings).get(f"/v1/policies/{policy or settings.policy}/versions")["data"]
    output.as_json(rows) if json else output.console.print(output.versions(rows))


@app.command()
def rollback(
    to: Annotated[
        str | None,
        typer.Option(help="a version, as 12 or v12; if unset a canary is ended, else the parent serves"),
    ] = None,
    reason: Annotated[str | None, typer.Option(help="kept in the audit log")] = None,
    policy: PolicyName = None,
    json: Json = False,
) -> None:
    """Undo the latest step or point back to an older version, and learn on from there."""
    api, path = Api(get_settings()), path_of(policy)
    if to is not None:
        body = {"version": number(to), "reason": reason}
    else:
        now = api.get(path)  # what this command has seen is what it undoes
        body = {"undo": number((now["canary"] or now["serving"]).rpartition("@")[2]), "reason": reason}
    result = api.post(f"{path}/rollback", body)
    output.as_json(result) if json else typer.echo(f"{result['left']} → {result['serving']}")


app.command()(analyze)
app.command()(deploy)
app.command()(delivery)
app.add_typer(canary, name="canary")
app.add_typer(shadow, name="shadow")
app.add_typer(keys, name="keys")
app.add_typer(projects, name="projects")
app.add_typer(pins, name="pin")
app.add_typer(raters, name="raters")
app.add_typer(train, name="train")
rewards.add_typer(models, name="models")
app.add_typer(rewards, name="rewards")
app.add_typer(rollouts, name="rollouts")
app.add_typer(subjects, name="subject")
app.command()(audit)
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
