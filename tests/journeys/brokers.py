"""Brokers for tests: a running Redis or RabbitMQ, isolated by database or queues, or a private Redis."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from shutil import which
from uuid import uuid4

import redis
from amqp.exceptions import ResourceLocked
from kombu import Connection

from tests.conftest import skip_or_fail
from tests.support.engine_fixture import free_port

REDIS = os.environ.get("ATTUNE_TEST_REDIS", "redis://127.0.0.1:6379")
RABBITMQ = os.environ.get("ATTUNE_TEST_RABBITMQ", "amqp://guest:guest@127.0.0.1:5672//")
QUEUES = ("attune", "curate", "assemble", "judge", "webhook", "publish", "train")
LEASE, OWNED = "attune-test", "attune-test-owned"  # keys: a run uses the database now; a run of these tests filled it
LEASE_SECONDS = 3600
LOCK_QUEUE = "attune-test-lock"
LOCK_SECONDS = 600


@contextmanager
def shared_redis() -> Iterator[str]:
    """Yield the URL of an unused database of the server and flush it afterwards. Parallel runs use different ones.

    What a killed run has left is deleted when its lease is over. Other data are never touched.
    """
    server = REDIS.rstrip("/")
    if server.rpartition("/")[2].isdigit():
        server = server.rpartition("/")[0]
    for number in range(15, 0, -1):
        client = redis.Redis.from_url(f"{server}/{number}", socket_connect_timeout=3)
        try:
            if take_database(client):
                yield f"{server}/{number}"
                client.flushdb()
                return
        except redis.ConnectionError as error:
            skip_or_fail(f"no Redis at {server} ({error})")
    skip_or_fail(f"no database of the Redis at {server} is free")


def take_database(client: redis.Redis) -> bool:
    """Lease a database that is empty, or that a killed run has left. Return whether it was free."""
    if not client.set(LEASE, uuid4().hex, nx=True, ex=LEASE_SECONDS):
        return False
    if client.exists(OWNED):
        client.flushdb()
        client.set(LEASE, uuid4().hex, ex=LEASE_SECONDS)
    if client.dbsize() > 1:
        client.delete(LEASE)
        return False
    client.set(OWNED, 1)
    return True


@contextmanager
def shared_rabbitmq() -> Iterator[str]:
    """Yield the server's URL. Attune's queues are deleted before and after. Parallel runs wait for each other.

    Queues have fixed names, so that a worker of another run would consume this run's messages.
    """
    try:
        with Connection(RABBITMQ, connect_timeout=3) as connection:
            connection.ensure_connection(max_retries=1, interval_start=0.1)
            lock_queue(connection)
            delete_queues(connection)
            yield RABBITMQ
            delete_queues(connection)
    except connection.connection_errors as error:
        skip_or_fail(f"no RabbitMQ at {RABBITMQ} ({error})")


def lock_queue(connection: Connection) -> None:
    """Declare a queue that only this connection may use; the server deletes it when the connection ends, or is cut."""
    ends = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            connection.channel().queue_declare(LOCK_QUEUE, exclusive=True)
            return
        except ResourceLocked:
            if time.monotonic() > ends:
                raise
            time.sleep(0.5)


def delete_queues(connection: Connection) -> None:
    for queue in QUEUES:
        with connection.channel() as channel:
            channel.queue_delete(queue)


@dataclass
class OwnRedis:
    """A private Redis that can be killed. It stores nothing on disk, so a kill loses its messages."""

    folder: Path
    port: int = field(default_factory=free_port)
    options: tuple[str, ...] = ("--save", "")
    password: str | None = None
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        if (binary := which("redis-server")) is None:
            skip_or_fail("redis-server is not installed")
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        self.process = subprocess.Popen([binary, *options, *self.options], stdout=subprocess.DEVNULL)
        client, ends = redis.Redis(port=self.port, password=self.password), time.monotonic() + 20
        while time.monotonic() < ends:
            with suppress(redis.ConnectionError):
                client.ping()
                return
            time.sleep(0.05)
        raise TimeoutError("redis-server did not start")

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None
