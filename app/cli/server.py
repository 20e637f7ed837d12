"""Commands that run processes of the service: up, serve, engine, worker, beat, trainer; and `attune db upgrade`."""

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Annotated

import httpx2
import typer
import uvicorn

from app.cli import client
from app.cli.projects import run_in_transaction
from app.core.http_protocol import LimitedHttpProtocol
from app.core.migrate import upgrade
from app.core.processes import ManagedProcess, port_error
from app.core.settings import Settings, get_settings
from app.ops.experiment_log import require_trackers
from app.projects.service import bootstrap

PrintLine = Callable[[str], None]
START_TIMEOUT_SECONDS = 600.0
SWITCH_SECONDS = 0.0005  # the event loop waits that long for the GIL, again and again, while a thread parses a body
database = typer.Typer(no_args_is_help=True, help="Manage the database schema.")


def prepare_database(settings: Settings, print_line: PrintLine) -> None:
    """Migrate the database to the newest schema. At the first start, create the default project and its API key."""
    settings.home.mkdir(0o700, parents=True, exist_ok=True)
    upgrade(settings.database)
    key = run_in_transaction(settings, lambda s: bootstrap(s, settings.policy, settings.model, settings.adaptation))
    if key is not None:
        client.save_api_key(settings, key)
        print_line(f"project 'default', API key (shown this once): {key}")


def check_ports_are_free(settings: Settings) -> None:
    """Raise ValueError if another process listens on our ports: it would answer in place of this service."""
    for name, host, port in (
        ("ATTUNE_PORT", settings.host, settings.port),
        ("ATTUNE_ENGINE_PORT", settings.engine_host, settings.engine_port),
    ):
        if (reason := port_error(host, port)) is not None:
            raise ValueError(f"{host}:{port} is taken ({reason}); is Attune already running? Otherwise set {name}")


def build_processes(settings: Settings) -> list[ManagedProcess]:
    """Return the processes in the order in which they are stopped: first those that accept work."""

    def process(name: str, *command: str, stop_timeout: float = 15.0) -> ManagedProcess:
        log = settings.logs_dir / f"{name}.log"
        return ManagedProcess(name, [sys.executable, "-m", *command], log, {"OMP_NUM_THREADS": "1"}, stop_timeout)

    return [
        process("api", "app.cli.main", "serve"),
        process("beat", "workers.celery_app", "beat"),
        process("worker", "workers.celery_app", "attune"),
        process("judge", "workers.celery_app", "judge"),
        process("rollout", "workers.celery_app", "rollout"),
        process("publisher", "workers.celery_app", "publish"),
        process("trainer", "app.cli.main", "trainer", stop_timeout=45.0),  # torchrun waits 30 s for its ranks
        process("engine", "workers.engine", stop_timeout=30.0),
    ]


class LocalDeployment:
    """A context manager that runs the whole service: on entry it waits until all is ready, on exit it stops all.

    Processes are restarted when they exit, and stopped in order.
    """

    def __init__(self, settings: Settings, print_line: PrintLine) -> None:
        self.settings, self.print_line = settings, print_line
        self.processes = build_processes(settings)

    def __enter__(self) -> "LocalDeployment":
        check_ports_are_free(self.settings)
        prepare_database(self.settings, self.print_line)
        try:
            for process in reversed(self.processes):
                process.start()
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _wait_until_ready(self) -> None:
        started, last_message_at = time.monotonic(), 0.0
        while (problem := self._readiness_problem()) is not None:
            waited = time.monotonic() - started
            if waited > START_TIMEOUT_SECONDS:
                raise TimeoutError(f"not ready after {waited:.0f} s: {problem}; see {self.settings.logs_dir}")
            if waited - last_message_at >= 5:
                last_message_at = waited
                self.print_line(f"starting, {waited:.0f} s: {problem}")
            self.restart_dead_processes()
            time.sleep(0.25)
        waited = time.monotonic() - started
        self.print_line(f"ready at {self.settings.url} after {waited:.0f} s; logs in {self.settings.logs_dir}")

    def _readiness_problem(self) -> str | None:
        try:
            response = httpx2.get(f"{self.settings.url}/readyz", timeout=5, trust_env=False)
        except httpx2.TransportError:
            return "the API does not respond yet"
        return None if response.status_code == 200 else str(response.json()["error"]["message"])

    def restart_dead_processes(self) -> None:
        for process in self.processes:
            if (message := process.restart_if_dead()) is not None:
                self.print_line(message)

    def run(self) -> None:
        """Restart dead processes until ctrl-C."""
        try:
            while True:
                self.restart_dead_processes()
                time.sleep(0.5)
        except KeyboardInterrupt:
            pass

    def stop(self) -> None:
        try:
            self.print_line("stopping")
        finally:  # also when the output is closed
            for process in self.processes:
                process.stop()
        self.print_line("stopped")


def exec_module(*command: str) -> None:
    """Replace this process with `python -m command`, so that signals reach it directly."""
    os.execv(sys.executable, [sys.executable, "-m", *command])


def up() -> None:
    """Run the whole service on this machine: engine, API, workers and trainer. Ctrl-C stops it."""
    for number in (signal.SIGTERM, signal.SIGINT):  # a shell starts background jobs with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    require_trackers(get_settings().trackers)
    try:
        with LocalDeployment(get_settings(), typer.echo) as deployment:
            typer.echo("try `attune chat` in another terminal; ctrl-C stops everything")
            deployment.run()
    except KeyboardInterrupt:  # while it starts
        pass


def serve() -> None:
    """Run the HTTP API."""
    settings = get_settings()
    prepare_database(settings, typer.echo)
    sys.setswitchinterval(SWITCH_SECONDS)
    uvicorn.run(
        "app.main:serve",
        factory=True,
        host=settings.host,
        port=settings.port,
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=10,
        http=LimitedHttpProtocol,
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
    settings.home.mkdir(0o700, parents=True, exist_ok=True)
    upgrade(settings.database)
