"""The processes of an environment of others: started when needed, shared by episodes, replaced when they die."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

from alignment.environments.errors import InfrastructureFailure
from alignment.environments.host_process import HostConfig, HostProcess
from alignment.environments.tools.base import JsonObject

log = logging.getLogger(__name__)
TRIES = 2  # to start a process


class Opened(BaseModel):
    """What a process says of its environment: how many episodes it serves at a time, and whether as coroutines."""

    episodes: int
    is_concurrent: bool


@dataclass(frozen=True)
class ForeignName:
    """What a process opens. `label` names it in messages."""

    adapter: Path
    name: str
    arguments: JsonObject
    label: str


@dataclass
class Place:
    """A process, and the number of the episodes in it."""

    process: HostProcess
    opened: Opened
    num_episodes: int = 0


class HostPool:
    """At most `config.processes` processes with the same environment."""

    def __init__(self, name: ForeignName, config: HostConfig) -> None:
        self.name = name
        self.config = config
        self._lock = asyncio.Lock()
        self._places: list[Place] = []
        self._free: asyncio.Semaphore | None = None

    @asynccontextmanager
    async def use(self) -> AsyncIterator[Place]:
        """Wait for a place in a process, which is started if need be. Raises UnavailableEnvironment.

        Raises InfrastructureFailure if the process has died while starting, and once more.
        """
        free = self._free or await self._start_first()
        async with free:
            place = await self._find_place()
            place.num_episodes += 1
            try:
                yield place
            finally:
                place.num_episodes -= 1

    async def close(self) -> None:
        """End all processes."""
        async with self._lock:
            places = self._places
            self._places = []
            self._free = None
        await asyncio.gather(*(asyncio.to_thread(place.process.close) for place in places))

    def open_blocking(self) -> HostProcess:
        """Return a process of the caller's own, without an event loop."""
        process = HostProcess(self.config, self.name.adapter, self.name.label)
        try:
            process.call_blocking("open", self._request(), self.config.start_seconds)
        except BaseException:
            process.close()
            raise
        return process

    async def _start_first(self) -> asyncio.Semaphore:
        async with self._lock:
            if self._free is None:
                place = await self._start()
                self._free = asyncio.Semaphore(self.config.processes * place.opened.episodes)
            return self._free

    async def _find_place(self) -> Place:
        """Return the process with the fewest episodes, or a new one. A free place has been counted before."""
        async with self._lock:
            self._places = [place for place in self._places if place.process.is_alive]
            least = min(self._places, key=lambda place: place.num_episodes, default=None)
            if least is None or (least.num_episodes > 0 and len(self._places) < self.config.processes):
                return await self._start()
            return least

    async def _start(self) -> Place:
        for tries_left in reversed(range(TRIES)):
            try:
                place = await self._open()
            except InfrastructureFailure as failure:
                if tries_left == 0:
                    raise
                log.warning("foreign_environment_restarted", extra={"label": self.name.label, "reason": str(failure)})
            else:
                self._places.append(place)
                return place
        raise AssertionError("unreachable")

    async def _open(self) -> Place:
        process = HostProcess(self.config, self.name.adapter, self.name.label)
        try:
            answer = await process.call("open", self._request(), self.config.start_seconds)
            opened = Opened.model_validate(answer)
        except ValidationError as error:
            process.kill("has not said what it has opened")
            raise InfrastructureFailure(f"{self.name.label} has not said what it has opened") from error
        except BaseException:
            process.kill("could not open its environment")
            raise
        if self.config.episodes_per_process is not None:
            opened.episodes = min(opened.episodes, self.config.episodes_per_process)
        return Place(process, opened)

    def _request(self) -> JsonObject:
        return {"name": self.name.name, "arguments": self.name.arguments}
