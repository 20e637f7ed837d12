"""The leases of the attempts that a process plays, renewed by a thread: an environment may block the event loop."""

import asyncio
import logging
import threading
from contextlib import AbstractContextManager

from alignment.environments.errors import InfrastructureFailure, ServiceRefusal
from alignment.environments.run_client import RunClient
from alignment.environments.service_client import ServiceClient

log = logging.getLogger(__name__)
STOP_SECONDS = 1.0


class RunLeases(AbstractContextManager["RunLeases"]):
    """Renews the leases of the attempts that were added, four times in `seconds`.

    A lease that is lost is not renewed any more: the service has ended the episode, and refuses its chats and its end.
    """

    def __init__(self, service: ServiceClient, name: str, seconds: float) -> None:
        self._service = service
        self._name = name
        self._interval = seconds / 4
        self._fences: dict[str, int] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)

    def __enter__(self) -> "RunLeases":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join(STOP_SECONDS)

    def add(self, id: str, fence: int) -> None:
        with self._lock:
            self._fences[id] = fence

    def remove(self, id: str) -> None:
        with self._lock:
            self._fences.pop(id, None)

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            service = runner.run(self._open())
            client = RunClient(service, self._name)
            while not self._stop.wait(self._interval):
                with self._lock:
                    fences = dict(self._fences)
                if fences:
                    runner.run(self._renew(client, fences))
            runner.run(service.close())

    async def _open(self) -> ServiceClient:
        # A renewal that finds no service must leave time for the next one.
        return self._service.copy(patience=self._interval)

    async def _renew(self, client: RunClient, fences: dict[str, int]) -> None:
        try:
            lost = await client.renew(fences)
        except (InfrastructureFailure, ServiceRefusal) as error:
            log.warning("the leases of %d attempts were not renewed (%s)", len(fences), error)
            return
        with self._lock:
            for id in lost:
                if self._fences.get(id) == fences[id]:
                    del self._fences[id]
