"""Commands that run a process of the service: up, serve, engine, worker, beat, trainer; and `attune db upgrade`."""

import os
import signal
import sys
import time
from typing import Annotated

import typer
import uvicorn

from app.cli.up import LocalDeployment, prepare_database
from app.core.migrate import upgrade
from app.core.settings import get_settings
from app.ops.experiment_log import require_trackers

database = typer.Typer(no_args_is_help=True, help="Manage the database schema.")


def exec_module(*command: str) -> None:
    """Replace this process with `python -m command`, so that signals reach it directly."""
    os.execv(sys.executable, [sys.executable, "-m", *command])


def up() -> None:
    """Run the whole service on this machine: engine, API, workers and trainer. Ctrl-C stops it."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGINT):  # a shell starts background jobs with SIGINT ignored
        signal.signal(number, stop)
    require_trackers(get_settings().trackers)
    try:
        with LocalDeployment(get_settings(), typer.echo) as deployment:
            typer.echo("try `attune chat` in another terminal; ctrl-C stops everything")
            while True:
                deployment.restart_dead_processes()
                time.sleep(0.5)
    except KeyboardInterrupt:
        pass


def serve() -> None:
    """Run the HTTP API."""
    settings = get_settings()
    prepare_database(settings, typer.echo)
    uvicorn.run(
        "app.main:serve",
        factory=True,
        host=settings.host,
        port=settings.port,
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=10,
        timeout_keep_alive=75,  # clients close idle connections after five seconds; uvicorn's five would race with that
    )


def engine() -> None:
    """Run one SGLang replica under a supervisor."""
    prepare_database(get_settings(), typer.echo)
    exec_module("workers.engine")


def worker(
    queue: Annotated[
        list[str] | None,
        typer.Option(
            help="attune (curate, assemble, reconcile), judge, rollout, or publish (evaluate, publish); default: all"
        ),
    ] = None,
) -> None:
    """Run a Celery worker for the stages between feedback and release."""
    exec_module("workers.celery_app", *(queue or []))


def beat() -> None:
    """Run Celery beat, which starts the reconciler periodically. Run one per deployment."""
    exec_module("workers.celery_app", "beat")


def trainer(
    nproc: Annotated[int | None, typer.Option(help="ranks on this host; default: ATTUNE_TRAINER_RANKS")] = None,
    nnodes: Annotated[str, typer.Option(help="number of hosts, or MIN:MAX; more than one needs --rdzv-endpoint")] = "1",
    rdzv_endpoint: Annotated[
        str | None, typer.Option(help="HOST:PORT of the rendezvous: one of the hosts, the same on every host")
    ] = None,
    rdzv_id: Annotated[str, typer.Option(help="the group's name at the rendezvous")] = "attune-trainer",
    rank_timeout: Annotated[
        float, typer.Option(min=1, help="seconds without a response from a rank after which the group restarts")
    ] = 300.0,
) -> None:
    """Run the trainer under torchrun, which restarts the group when a rank exits or hangs."""
    require_trackers(get_settings().trackers)  # otherwise torchrun would restart it again and again
    if nnodes != "1" and rdzv_endpoint is None:
        raise ValueError("--nnodes needs --rdzv-endpoint HOST:PORT, the same on every host")
    rendezvous = ["--standalone"]
    if rdzv_endpoint is not None:
        rendezvous = ["--nnodes", nnodes, "--rdzv-backend", "c10d"]
        rendezvous += ["--rdzv-endpoint", rdzv_endpoint, "--rdzv-id", rdzv_id]
    ranks = ["--nproc-per-node", str(nproc or get_settings().trainer_ranks)]
    restarts = ["--max-restarts", "1000000", "--monitor-interval", "1"]
    exec_module("workers.training.watchdog", str(rank_timeout), *rendezvous, *ranks, *restarts)


def simulate(context: typer.Context) -> None:
    """Run simulated users who chat and give feedback: `attune simulate --help`."""
    exec_module("demo.simulate", *context.args)


@database.command("upgrade")
def upgrade_database() -> None:
    """Run the pending migrations."""
    settings = get_settings()
    settings.home.mkdir(parents=True, exist_ok=True)
    upgrade(settings.database)
