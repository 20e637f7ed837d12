"""Commands that run processes of the service: up, serve, engine, worker, beat, trainer; and `attune db upgrade`."""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated

import httpx2
import typer
import uvicorn
from sqlalchemy.ext.asyncio import AsyncSession

from app.cli import client
from app.cli.console import describe_console
from app.cli.options import Home
from app.cli.projects import run_in_transaction
from app.cli.up_record import hold_record, require_no_running
from app.core.connection_limit import ConnectionLimit, TrustedProxies
from app.core.database_roles import grant_service
from app.core.draining_server import DrainingServer
from app.core.http_protocol import LimitedHttpProtocol
from app.core.migrate import LOCK_ATTEMPTS, downgrade, require_compatible_schema, upgrade
from app.core.processes import ManagedProcess
from app.core.request_log import log_config
from app.core.settings import Settings, get_settings
from app.core.settings.loading import load_settings
from app.engines.adaptation import adaptation_of
from app.ops.experiment_log import require_trackers
from app.ops.start_checks import require_startable
from app.policies import lifecycle
from app.policies.adapter_shape import require_adapter_shape
from app.projects.service import bootstrap

PrintLine = Callable[[str], None]
START_TIMEOUT_SECONDS = 600.0
SWITCH_SECONDS = 0.0005  # the event loop waits that long for the GIL, again and again, while a thread parses a body
database = typer.Typer(no_args_is_help=True, help="Manage the database schema.")


def prepare_database(settings: Settings, print_line: PrintLine) -> None:
    """Migrate the database to the newest schema. At the first start, create the default project and its API key."""
    migrate_database(settings)
    create_default_project(settings, print_line)


def migrate_database(settings: Settings, attempts: int = LOCK_ATTEMPTS) -> None:
    settings.home.mkdir(0o700, parents=True, exist_ok=True)
    upgrade(settings.owner_database_url, attempts)
    grant_service(settings)


def create_default_project(settings: Settings, print_line: PrintLine) -> None:
    """Create the default project, its API key and the policy, if they are missing."""
    require_adapter_shape(settings)
    key = run_in_transaction(settings, lambda s: _bootstrap(s, settings))
    run_in_transaction(settings, lambda s: lifecycle.require_fitting_settings(s, settings))
    if key is not None:
        client.save_api_key(settings, key)
        # The output of a container goes to logs that many people read.
        where = f"(shown this once): {key}" if sys.stdout.isatty() else f"saved in {settings.credentials_file}"
        print_line(f"project 'default', API key {where}")


async def _bootstrap(session: AsyncSession, settings: Settings) -> str | None:
    key = await bootstrap(session, settings.policy, settings.model)
    await adaptation_of(settings).check_versions(session)
    return key


def build_processes(settings: Settings) -> list[ManagedProcess]:
    """Return the processes in the order in which they are stopped: first those that accept work."""

    # There is no load balancer, and ctrl-C must not take minutes.
    environment = {
        "OMP_NUM_THREADS": "1",
        "ATTUNE_SERVER__SHUTDOWN_DELAY_SECONDS": "0",
        "ATTUNE_SERVER__SHUTDOWN_SECONDS": "10",
    }
    # The options of `attune up`.
    environment |= {"ATTUNE_HOME": str(settings.home.resolve()), "ATTUNE_SERVER__PORT": str(settings.server.port)}
    environment["ATTUNE_MODEL"] = settings.model

    def process(name: str, *command: str, stop_timeout: float = 15.0) -> ManagedProcess:
        log = settings.logs_dir / f"{name}.log"
        return ManagedProcess(name, [sys.executable, "-m", *command], log, dict(environment), stop_timeout)

    processes = [
        process("api", "app.cli.main", "serve"),
        process("beat", "workers.celery_app", "beat"),
        process("worker", "workers.celery_app", "attune"),
        process("judge", "workers.celery_app", "judge"),
        process("rollout", "workers.celery_app", "rollout"),
        process("publisher", "workers.celery_app", "publish"),
        process("trainer", "app.cli.main", "trainer", stop_timeout=45.0),  # torchrun waits 30 s for its ranks
        process("engine", "workers.engine", stop_timeout=30.0),
    ]
    if first := settings.observability.metrics_port:  # each role has its port, so that Prometheus finds it
        for port, child in enumerate(processes[1:], first):
            child.environment["ATTUNE_OBSERVABILITY__METRICS_PORT"] = str(min(port, 65535))
    return processes


class LocalDeployment:
    """A context manager that runs the whole service: on entry it waits until all is ready, on exit it stops all.

    Processes are restarted when they exit, and stopped in order.
    """

    def __init__(self, settings: Settings, print_line: PrintLine) -> None:
        self.settings, self.print_line = settings, print_line
        self.processes = build_processes(settings)
        self._record = ExitStack()

    def __enter__(self) -> "LocalDeployment":
        require_no_running(self.settings)
        require_startable(self.settings)
        with ExitStack() as record:
            record.enter_context(hold_record(self.settings, [process.name for process in self.processes]))
            prepare_database(self.settings, self.print_line)
            self._record = record.pop_all()
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
        self.print_line(f"ready at {self.settings.local_url} after {waited:.0f} s; logs in {self.settings.logs_dir}")

    def _readiness_problem(self) -> str | None:
        try:
            response = httpx2.get(f"{self.settings.local_url}/readyz", timeout=5, trust_env=False)
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
            self._record.close()
        self.print_line("stopped")


def exec_module(*command: str) -> None:
    """Replace this process with `python -m command`, so that signals reach it directly."""
    os.execv(sys.executable, [sys.executable, "-m", *command])


def up(
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="of the API; default: ATTUNE_SERVER__PORT")] = None,
    model: Annotated[
        str | None, typer.Option(help="a model's folder, or its Hugging Face name; default: ATTUNE_MODEL")
    ] = None,
    home: Home = None,
) -> None:
    """Run the whole service on this machine: engine, API, workers and trainer. Ctrl-C or `attune stop` stops it."""
    for number in (signal.SIGTERM, signal.SIGINT):  # a shell starts background jobs with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    options = {"server.port": port, "model": model, "home": home}
    settings = load_settings().settings.replace(client.drop_unset(**options))
    try:
        with LocalDeployment(settings, typer.echo) as deployment:
            if settings.server.console and sys.stdout.isatty():  # a link is a key; logs are read by many
                typer.echo(describe_console(settings))
            typer.echo("try `attune chat` in another terminal; ctrl-C or `attune stop` stops everything")
            deployment.run()
    except KeyboardInterrupt:  # while it starts
        pass


def serve() -> None:
    """Run the HTTP API."""
    settings = get_settings()
    require_compatible_schema(settings.database_url)
    create_default_project(settings, typer.echo)
    sys.setswitchinterval(SWITCH_SECONDS)
    with suppress(KeyboardInterrupt):
        DrainingServer(server_config(settings), settings.server.shutdown_delay_seconds).run()


def server_config(settings: Settings) -> uvicorn.Config:
    class Protocol(LimitedHttpProtocol):
        max_body_seconds = settings.server.max_body_seconds

    config = uvicorn.Config(
        "app.main:serve",
        factory=True,
        host=settings.server.host,
        port=settings.server.port,
        access_log=False,
        log_level="warning",
        log_config=log_config(settings.observability.log_format, "api"),
        timeout_graceful_shutdown=settings.server.shutdown_seconds,
        http=Protocol,
        timeout_keep_alive=75,  # clients close idle connections after five seconds; uvicorn's five would race with that
    )
    proxies = TrustedProxies(config.forwarded_allow_ips)
    Protocol.connection_limit = ConnectionLimit(settings.limits.max_connections_per_address, proxies)
    return config


def engine(
    ready_file: Annotated[
        Path | None, typer.Option(help="a file that exists while the engine takes traffic, for readiness probes")
    ] = None,
) -> None:
    """Run one engine (`engine.kind`, SGLang by default) under a supervisor."""
    require_compatible_schema(get_settings().database_url)
    require_adapter_shape(get_settings())
    exec_module("workers.engine", *(["--ready-file", str(ready_file)] if ready_file else []))


def worker(
    queue: Annotated[
        list[str] | None,
        typer.Option(
            help="attune (curate, assemble, reconcile), judge (and webhooks), rollout, or publish (evaluate, publish); "
            "default: all"
        ),
    ] = None,
) -> None:
    """Run a Celery worker for the stages between feedback and release."""
    require_compatible_schema(get_settings().database_url)
    exec_module("workers.celery_app", *(queue or []))


def beat() -> None:
    """Run Celery beat, which starts the reconciler periodically. Run one per deployment."""
    exec_module("workers.celery_app", "beat")


def trainer(
    nproc: Annotated[int | None, typer.Option(help="ranks on this host; default: ATTUNE_TRAINER__RANKS")] = None,
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
    if nnodes != "1" and rdzv_endpoint is None:
        raise ValueError("--nnodes needs --rdzv-endpoint HOST:PORT, the same on every host")
    require_trackers(get_settings().observability.trackers)  # otherwise torchrun would restart it again and again
    require_compatible_schema(get_settings().database_url)
    require_adapter_shape(get_settings())
    rendezvous = ["--standalone"]
    if rdzv_endpoint is not None:
        rendezvous = ["--nnodes", nnodes, "--rdzv-backend", "c10d"]
        rendezvous += ["--rdzv-endpoint", rdzv_endpoint, "--rdzv-id", rdzv_id]
    ranks = ["--nproc-per-node", str(nproc or get_settings().trainer.ranks)]
    restarts = ["--max-restarts", "1000000", "--monitor-interval", "1"]
    exec_module("workers.training.watchdog", str(rank_timeout), *rendezvous, *ranks, *restarts)


def simulate(context: typer.Context) -> None:
    """Run simulated users who chat and give feedback: `attune simulate --help`."""
    exec_module("demo.simulate", *context.args)


@database.command("upgrade")
def upgrade_database(
    attempts: Annotated[
        int, typer.Option(min=1, help="how often a migration tries to lock its tables, for half a second each time")
    ] = LOCK_ATTEMPTS,
) -> None:
    """Run the pending migrations. The service may run meanwhile: upgrade first, then replace its processes."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    migrate_database(get_settings(), attempts)


@database.command("downgrade")
def downgrade_database(
    revision: Annotated[str, typer.Argument(help="the schema to return to, such as 20261123_0400")],
    attempts: Annotated[
        int, typer.Option(min=1, help="how often a migration tries to lock its tables, for half a second each time")
    ] = LOCK_ATTEMPTS,
) -> None:
    """Take the migrations after REVISION back. Stop all processes first, and start those of the older release after."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    downgrade(get_settings().owner_database_url, revision, attempts)
    grant_service(get_settings())
