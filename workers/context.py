"""What a worker process holds: settings, the database, and one event loop."""

import asyncio
import os
import socket
from collections.abc import Coroutine
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from app.core.database import Database
from app.core.jobs import TaskSender, make_celery
from app.core.settings import Settings, get_settings

T = TypeVar("T")


def lease_owner(pid: int) -> str:
    """Return the name in leases of a process of this machine."""
    return f"{socket.gethostname()}:{pid}"


@dataclass
class WorkerContext:
    """Everything is built on first use. `owner` identifies this process in leases."""

    settings: Settings = field(default_factory=get_settings)

    @cached_property
    def db(self) -> Database:
        task_sender = TaskSender(make_celery(self.settings.broker.url, self.settings.broker_dir))
        return Database(self.settings.database_url, task_sender, seconds=self.settings.database.job_timeout_seconds)

    @cached_property
    def runner(self) -> asyncio.Runner:
        return asyncio.Runner()

    @property
    def owner(self) -> str:
        return lease_owner(os.getpid())

    def run(self, coroutine: Coroutine[object, None, T]) -> T:
        """Run a coroutine to completion on this process's event loop."""
        return self.runner.run(coroutine)
