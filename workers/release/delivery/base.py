"""Delivery: what a release does differently for adapters and for full weights. `delivery_of` chooses."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from sqlalchemy.ext.asyncio import AsyncSession

from alignment.release.canary import CanaryConfig
from alignment.release.gates import FunctionGate, MetricGate, PromptsGate
from alignment.release.shadow import ShadowConfig
from app.core.database import Database
from app.core.jobs import TaskName
from app.core.settings import Settings
from app.inference.pool import EnginePool
from app.models import Engine, Policy, Version
from workers.release.verify_delivery import Timings, VerificationResult

GateKinds = tuple[type[MetricGate | FunctionGate | PromptsGate], ...]


class Delivery(ABC):
    """How trained versions reach the engines."""

    gates_before: ClassVar[GateKinds]  # they run before an engine is asked anything
    gates_after: ClassVar[GateKinds]  # they run once enough engines have verified the version
    counts_unreached_gates: ClassVar[bool]  # whether an attempt counts whose gates no engine answered
    tasks_after_release: ClassVar[tuple[TaskName, ...]]

    @abstractmethod
    async def check(self, version: Version, settings: Settings, timings: Timings) -> None:
        """Check the files, if that must come before the gates. Raises DamagedAdapter."""

    @abstractmethod
    async def verify(
        self,
        db: Database,
        settings: Settings,
        pool: EnginePool,
        engines: Sequence[Engine],
        version: Version,
        timings: Timings,
    ) -> VerificationResult:
        """Load the version on the ready engines under its own name, and verify it there.

        Raises:
            DamagedAdapter: the files are not the ones that were sealed.
        """

    @abstractmethod
    async def sync(self, db: Database, settings: Settings) -> None:
        """Load what serves on the engines that hold another version in its place."""

    @abstractmethod
    async def has_outdated_engine(self, session: AsyncSession) -> bool:
        """Return whether `sync` has something to do."""

    @abstractmethod
    def canary(self, policy: Policy, settings: Settings) -> CanaryConfig | None:
        """Return how a version is tried on a share of the users first, or None."""

    @abstractmethod
    def shadow(self, policy: Policy, settings: Settings) -> ShadowConfig | None:
        """Return how a version answers in shadow first, or None."""
