"""What a worker process holds: settings, the database, the bell, and one event loop for all its life."""

import asyncio
import os
import socket
from collections.abc import Coroutine
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from app.core.database import Database
from app.core.jobs import TaskSender, make_celery
from app.core.settings import Settings, get_settings


@dataclass
class WorkerContext:
    settings: Settings = field(default_factory=get_settings)

    @cached_property
    def db(self) -> Database:
        bell = TaskSender(make_celery(self.settings.broker_url, self.settings.broker_dir))
        return Database(self.settings.database, bell, seconds=self.settings.database_job_seconds)

    @cached_property
    def runner(self) -> asyncio.Runner:
        return asyncio.Runner()

    @property
    def owner(self) -> str:
        return f"{socket.gethostname()}:{os.getpid()}"

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)
