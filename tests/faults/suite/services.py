"""A private PostgreSQL and a private Redis on free ports, which can be killed and restarted."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg

from app.core.processes import die_with_parent
from tests.support.engine_fixture import free_port

SERVER_OPTIONS = (
    "-c",
    "fsync=on",
    "-c",
    "shared_buffers=64MB",
    "-c",
    "max_connections=200",
    "-c",
    "unix_socket_directories=",
)


def postgres_directory() -> Path | None:
    binaries = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres")) if os.name == "posix" else []
    return binaries[-1].parent if binaries else None


def are_available() -> bool:
    return postgres_directory() is not None and shutil.which("redis-server") is not None


class Services:
    """A context manager: `with Services() as services: services.urls()`."""

    def __init__(self) -> None:
        self.folder = Path(
            tempfile.mkdtemp(prefix="attune-services-")
        )  # the server's user cannot read a test's tmp_path
        self.postgres_port, self.redis_port = free_port(), free_port()
        self.data = self.folder / "postgres"
        self._postgres: subprocess.Popen[bytes] | None = None
        self._redis: subprocess.Popen[bytes] | None = None
        # PostgreSQL refuses to run as root.
        self._user: dict[str, Any] = {"user": "postgres", "group": "postgres"} if os.getuid() == 0 else {}

    def __enter__(self) -> "Services":
        binaries = postgres_directory()
        assert binaries is not None
        self.folder.chmod(0o711)
        self.data.mkdir()
        if self._user:
            shutil.chown(self.data, "postgres", "postgres")
        self.data.chmod(0o700)
        subprocess.run(
            [binaries / "initdb", "-D", self.data, "-U", "postgres", "-A", "trust", "--no-sync"],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd="/",
            **self._user,
        )
        self.start_postgres()
        with psycopg.connect(self._server, autocommit=True) as server:
            server.execute("CREATE DATABASE attune")
        self.start_redis()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill_postgres()
        self.kill_redis()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def _server(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.postgres_port}/postgres"

    def urls(self, postgres_port: int | None = None, redis_port: int | None = None) -> dict[str, str]:
        """Return the settings of both services, with other ports if a proxy is in front of them."""
        return {
            "database__url": f"postgresql+psycopg://postgres@127.0.0.1:{postgres_port or self.postgres_port}/attune",
            "broker__url": f"redis://127.0.0.1:{redis_port or self.redis_port}/0",
        }

    def start_postgres(self) -> None:
        binaries = postgres_directory()
        assert binaries is not None
        with (self.folder / "postgres.log").open("ab") as log:
            self._postgres = subprocess.Popen(
                [
                    binaries / "postgres",
                    "-D",
                    self.data,
                    "-p",
                    str(self.postgres_port),
                    "-h",
                    "127.0.0.1",
                    *SERVER_OPTIONS,
                ],
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(signal.SIGQUIT),  # PostgreSQL's immediate shutdown
                **self._user,
            )
        ends = time.monotonic() + 30
        while time.monotonic() < ends:
            with suppress(psycopg.OperationalError), psycopg.connect(self._server, connect_timeout=1):
                return
            time.sleep(0.05)
        raise TimeoutError((self.folder / "postgres.log").read_text()[-2000:])

    def kill_postgres(self) -> None:
        """Kill the server and the processes of its connections with SIGKILL."""
        if self._postgres is not None:
            pids = child_pids(self._postgres.pid)
            for pid in (self._postgres.pid, *pids):
                with suppress(ProcessLookupError):
                    os.kill(pid, 9)
            self._postgres.wait()
            while any(Path(f"/proc/{pid}").exists() for pid in pids):
                time.sleep(0.01)
            (self.data / "postmaster.pid").unlink(missing_ok=True)
            self._postgres = None

    def restart_postgres(self) -> None:
        """Restart the server as an operator does: a fast shutdown, which ends all connections, and a start."""
        assert self._postgres is not None
        self._postgres.send_signal(signal.SIGINT)
        self._postgres.wait(timeout=60)
        self.start_postgres()

    def restart_redis(self) -> None:
        """Restart the server, which forgets every message: it saves nothing."""
        assert self._redis is not None
        self._redis.terminate()
        self._redis.wait(timeout=60)
        self.start_redis()

    def start_redis(self) -> None:
        self._redis = subprocess.Popen(
            ["redis-server", "--port", str(self.redis_port), "--bind", "127.0.0.1", "--save", "", "--dir", self.folder],
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )

    def kill_redis(self) -> None:
        if self._redis is not None:
            self._redis.kill()
            self._redis.wait()
            self._redis = None


def child_pids(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []
