"""The attempts of a run that this process plays: claimed from the service, held while they are played, given back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from alignment.environments.attempts import derive_seed
from alignment.environments.errors import InfrastructureFailure, ServiceRefusal
from alignment.environments.run_client import AttemptRecord, RunClient
from alignment.environments.run_leases import RunLeases
from alignment.environments.run_plan import PlannedAttempt, TaskList

LONGEST_WAIT_SECONDS = 2.0  # between two claims while other processes play what is left
RELEASE_SECONDS = 10.0  # to give back what an interrupted run leaves


class AttemptClaims:
    """Claims attempts, one at a time. `seed` is the plan's, and `lease_seconds` how long a claim holds."""

    def __init__(self, client: RunClient, leases: RunLeases, tasks: TaskList, seed: int, lease_seconds: float) -> None:
        self._client = client
        self._leases = leases
        self._tasks = tasks
        self._seed = seed
        self._wait_seconds = min(LONGEST_WAIT_SECONDS, lease_seconds / 4)
        self._claiming = asyncio.Lock()
        self._has_ended = asyncio.Event()

    async def next(self, owner: str) -> PlannedAttempt | None:
        """Return an attempt that this process holds now, or None once the run is complete.

        While other processes play what is left, it waits: one of them may die.
        """
        async with self._claiming:
            while True:
                self._has_ended.clear()
                claim = await self._client.claim(owner, self._tasks.length)
                if claim.attempt is not None:
                    if (planned := await self._plan(claim.attempt)) is not None:
                        return planned
                elif claim.is_complete:
                    return None
                else:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self._wait_seconds):
                            await self._has_ended.wait()  # an attempt of this process may be left to be repeated

    async def _plan(self, claimed: AttemptRecord) -> PlannedAttempt | None:
        """Return the attempt with its task, or None if the environment has no such task."""
        self._leases.add(claimed.id, claimed.fence)
        try:
            task = await self._tasks.get(claimed.task_index)
        except BaseException:
            await self._give_back(claimed.id, claimed.fence)
            raise
        if task is None:
            self._leases.remove(claimed.id)
            return None
        seed = derive_seed(self._seed, task.id, claimed.attempt_index)
        return PlannedAttempt(task, claimed.attempt_index, seed, claimed.id, claimed.fence)

    @asynccontextmanager
    async def hold(self, planned: PlannedAttempt) -> AsyncIterator[None]:
        """Renew the lease during the block, which reports the attempt. An error of the block gives it back."""
        try:
            yield
        except BaseException:
            await self._give_back(planned.id, planned.fence)
            raise
        finally:
            self._leases.remove(planned.id)
            self._has_ended.set()

    async def _give_back(self, id: str, fence: int) -> None:
        """Leave an attempt to another process. If the service does not hear of it, the lease runs out."""
        self._leases.remove(id)
        with suppress(InfrastructureFailure, ServiceRefusal, TimeoutError):
            async with asyncio.timeout(RELEASE_SECONDS):
                await self._client.release(id, fence)
