"""Checks of an installation: what `attune doctor` finds, and how to mend it. They work without a running service."""

import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

from alembic.script import ScriptDirectory
from huggingface_hub import try_to_load_from_cache
from kombu.exceptions import OperationalError as BrokerError
from sqlalchemy import NullPool, create_engine, make_url, select, text
from sqlalchemy.engine import Connection
from sqlalchemy.exc import SQLAlchemyError

from app.core import db_timeouts
from app.core.database_url import blocking_url
from app.core.jobs import make_celery
from app.core.migrate import alembic_config
from app.core.schema_version import check_schema
from app.core.settings import Settings
from app.models import Engine, EngineState
from app.training.base_parity import read_parity

GIB = 1024**3
DISK_PROBLEM_BYTES, DISK_WARNING_BYTES = GIB, 5 * GIB
SKEW_WARNING_SECONDS, SKEW_PROBLEM_SECONDS = 1.0, 30.0
HEARTBEAT_SECONDS = 30.0  # a supervisor writes one every few seconds
CONNECT_SECONDS = 3.0


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """What a check found. `fix` says how to mend it; it is empty if there is nothing to mend."""

    check: str
    level: Level
    found: str
    fix: str = ""


Check = Callable[[Settings], Iterator[Finding]]


def check_disk(settings: Settings) -> Iterator[Finding]:
    home = settings.home.resolve()
    existing = next(folder for folder in (home, *home.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    found = f"{free / GIB:.1f} GiB free for {home}"
    if free < DISK_PROBLEM_BYTES:
        yield Finding("disk", Level.PROBLEM, found, "Free disk space, or move ATTUNE_HOME to a larger disk.")
    elif free < DISK_WARNING_BYTES:
        fix = "Delete old versions with `attune versions prune`, or move ATTUNE_HOME to a larger disk."
        yield Finding("disk", Level.WARNING, found, fix)
    else:
        yield Finding("disk", Level.OK, found)
    try:
        probe = existing / f".attune-doctor-{time.time_ns()}"
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        fix = f"Give this user write access to {existing}, or set ATTUNE_HOME."
        yield Finding("disk", Level.PROBLEM, f"{existing} cannot be written to: {error.strerror}", fix)


def check_secrets(settings: Settings) -> Iterator[Finding]:
    """Check the files with keys, and that the keys of engines are complete."""
    if (settings.engine.api_key is None) != (settings.engine.admin_key is None):
        fix = "Set both ATTUNE_ENGINE__API_KEY and ATTUNE_ENGINE__ADMIN_KEY, or neither."
        yield Finding("keys", Level.PROBLEM, "one of the two keys of the engines is set, and is not used", fix)
    paths = [settings.credentials_file, settings.home.resolve() / "engine-keys.json"]
    readable = [path for path in paths if path.exists() and path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)]
    for path in readable:
        yield Finding(
            "keys", Level.PROBLEM, f"others can read {path}", f"Run `chmod 600 {path}`, then replace the key."
        )
    if not readable:
        names, home = ", ".join(path.name for path in paths if path.exists()), settings.home.resolve()
        found = f"{names} in {home}, readable by the owner alone" if names else f"no files of keys in {home} yet"
        yield Finding("keys", Level.OK, found)


def check_database(settings: Settings) -> Iterator[Finding]:
    """Check the connection, the schema, and this machine's clock against the database's."""
    url = make_url(settings.database_url)
    name = url.render_as_string(hide_password=True)
    try:
        check_schema(settings.database_url, ScriptDirectory.from_config(alembic_config(settings.database_url)))
    except ValueError as error:
        if "cannot be reached" in str(error):
            fix = "Start the database, and check the host, the user and the password in ATTUNE_DATABASE__URL."
            yield Finding("database", Level.PROBLEM, f"{name}: {str(error).splitlines()[0]}", fix)
        elif settings.database.url is None and "no tables yet" in str(error):
            yield Finding("database", Level.WARNING, f"{name} does not exist yet", "`attune up` creates it.")
        else:
            fix = "Install the newer release." if "newer release" in str(error) else "Run `attune db upgrade`."
            yield Finding("database", Level.PROBLEM, str(error).removesuffix(": run `attune db upgrade` first"), fix)
        return
    yield Finding("database", Level.OK, f"{name} has the schema of this release")
    with _connect(settings) as connection:
        skew = _database_clock(connection)
        yield describe_skew(skew)
        yield from _check_engines(connection, time.time() + skew)


@contextmanager
def _connect(settings: Settings) -> Iterator[Connection]:
    url = blocking_url(settings.database_url)
    is_file = url.get_backend_name() == "sqlite"
    arguments = {} if is_file else db_timeouts.connect_arguments(url, CONNECT_SECONDS)
    with create_engine(url, connect_args=arguments, poolclass=NullPool).connect() as connection:
        yield connection


def _database_clock(connection: Connection) -> float:
    """Return how many seconds the database's clock is ahead of this machine's. SQLite has the machine's own."""
    if connection.dialect.name == "sqlite":
        return 0.0
    before = time.time()
    seconds = connection.scalar(text("SELECT extract(epoch FROM clock_timestamp())"))
    return float(seconds or 0.0) - (before + time.time()) / 2


def describe_skew(skew: float) -> Finding:
    """Return the finding for a database clock that is `skew` seconds ahead of this machine's."""
    found = f"the clock of the database is {abs(skew):.2f} s {'ahead of' if skew >= 0 else 'behind'} this machine's"
    fix = "Run an NTP client (chrony, systemd-timesyncd) on both machines."
    if abs(skew) >= SKEW_PROBLEM_SECONDS:
        return Finding("clock", Level.PROBLEM, found, fix)
    if abs(skew) >= SKEW_WARNING_SECONDS:
        return Finding("clock", Level.WARNING, found, fix)
    return Finding("clock", Level.OK, found)


def _check_engines(connection: Connection, now: float) -> Iterator[Finding]:
    columns = (Engine.name, Engine.kind, Engine.url, Engine.state, Engine.heartbeat_at, Engine.reason)
    for name, kind, url, state, heartbeat_at, reason in connection.execute(select(*columns).order_by(Engine.name)):
        silent = heartbeat_at is not None and now - heartbeat_at > HEARTBEAT_SECONDS
        if state == EngineState.READY and not silent and _connects(url):
            yield Finding("engine", Level.OK, f"{name} at {url} is ready")
            continue
        why = f": {reason}" if reason else ""
        last_seen = f", last heartbeat {now - heartbeat_at:.0f} s ago" if silent and heartbeat_at else ""
        fix = f"Start it with `attune up` or `attune engine`; `attune logs --role {name}.{kind}` shows why it ended."
        yield Finding("engine", Level.WARNING, f"{name} at {url} does not answer ({state}{last_seen}){why}", fix)


def _connects(url: str) -> bool:
    parsed = urlsplit(url)
    try:
        socket.create_connection((parsed.hostname or "", parsed.port or 80), timeout=CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def check_engine_environment(settings: Settings) -> Iterator[Finding]:
    kind, interpreter = settings.engine.kind, settings.engine.interpreter
    if interpreter.exists():
        yield Finding("engine", Level.OK, f"the environment of {kind}: {interpreter}")
    else:
        target = "setup-vllm" if kind == "vllm" else "setup"
        fix = f"Run `make {target}`, or name the Python of the environment of {kind} in ATTUNE_ENGINE__PYTHON."
        found = f"{interpreter} is missing: no engine can run on this machine"
        yield Finding("engine", Level.WARNING if settings.engine.versions_url else Level.PROBLEM, found, fix)


def check_parity(settings: Settings) -> Iterator[Finding]:
    """Report the last comparison of engine and trainer on the base model."""
    if (record := read_parity(settings)) is None:
        return
    if record.reason is None:
        differences = f"{record.base:.1g} without and {record.adapter:.1g} with a random adapter"
        yield Finding("base model", Level.OK, f"log-probs of engine and trainer differ by {differences}")
    else:
        fix = "Use another model; or see docs/models.md for what engine and trainer compute differently."
        yield Finding("base model", Level.PROBLEM, record.reason, fix)


def check_broker(settings: Settings) -> Iterator[Finding]:
    if settings.broker.url is None:
        yield Finding("broker", Level.OK, f"embedded, in {settings.broker_dir}")
        return
    celery = make_celery(settings.broker.url, settings.broker_dir)
    with celery.connection_for_write(connect_timeout=CONNECT_SECONDS) as connection:
        name = connection.as_uri()
        try:
            connection.ensure_connection(max_retries=1, interval_start=0.1, timeout=CONNECT_SECONDS)
        except (BrokerError, OSError) as error:
            fix = "Start it, and check ATTUNE_BROKER__URL; until then the reconciler alone moves work on, in seconds."
            yield Finding("broker", Level.PROBLEM, f"{name} does not answer: {error}", fix)
        else:
            yield Finding("broker", Level.OK, f"{name} answers")


def check_model(settings: Settings) -> Iterator[Finding]:
    folder = Path(settings.model)
    if not folder.is_dir():
        if settings.model.startswith(("/", ".", "~")) or settings.model.count("/") > 1:
            fix = "Set ATTUNE_MODEL to a folder that exists, or to a name such as Qwen/Qwen2.5-0.5B-Instruct."
            yield Finding("model", Level.PROBLEM, f"there is no folder {settings.model}", fix)
        elif isinstance(try_to_load_from_cache(settings.model, "config.json"), str):
            yield Finding("model", Level.OK, f"{settings.model} is in the cache of Hugging Face")
        else:
            fix = "The first start downloads it; without access to the hub, set ATTUNE_MODEL to a folder."
            yield Finding("model", Level.WARNING, f"{settings.model} is not in the cache of Hugging Face", fix)
        return
    wanted = {"config.json": "config.json", "weights": "*.safetensors", "a tokenizer": "tokenizer*"}
    if missing := [name for name, pattern in wanted.items() if not any(folder.glob(pattern))]:
        fix = "Copy the whole model folder; `make setup` and git-lfs restore the demo model."
        yield Finding("model", Level.PROBLEM, f"{folder} lacks {', '.join(missing)}", fix)
    else:
        yield Finding("model", Level.OK, str(folder))


CHECKS: tuple[Check, ...] = (
    check_disk,
    check_secrets,
    check_database,
    check_broker,
    check_engine_environment,
    check_parity,
    check_model,
)


def diagnose(settings: Settings, checks: Iterable[Check] = CHECKS) -> Iterator[Finding]:
    """Yield what each check finds. A check that breaks off is a problem itself."""
    for check in checks:
        try:
            yield from check(settings)
        except (OSError, SQLAlchemyError) as error:
            name = check.__name__.removeprefix("check_")
            yield Finding(name, Level.PROBLEM, f"the check broke off: {error}", "Mend what the message names.")
