"""Delivery: what a release does differently for adapters and for full weights. `choice.delivery_of` chooses."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from sqlalchemy.ext.asyncio import AsyncSession

from alignment.release.canary import CanaryConfig
from alignment.release.shadow import ShadowConfig
from app.core.database import Database
from app.core.jobs import TaskName
from app.core.settings import Settings
from app.engines import fleet
from app.inference.pool import EnginePool
from app.inference.transport import EngineUnavailable
from app.models import Engine, Policy, Version
from workers.release.gates import GateRunner
from workers.release.verify_delivery import Timings


@dataclass(frozen=True)
class Attempt:
    """One attempt to verify a version on the ready engines. `settings` are those of its policy."""

    db: Database
    settings: Settings
    pool: EnginePool
    engines: Sequence[Engine]
    version: Version
    gates: GateRunner
    timings: Timings


@dataclass
class DeliveryResult:
    """How an attempt ended.

    Attributes:
        engines: The engines that were ready.
        verified_engines: Those that verified the version, by name.
        errors: What the others answered.
        num_unreachable: How many of the others were unreachable from the start.
        is_verified: Whether enough engines have verified the version for it to serve.
        refusal: Why a gate refuses the version.
    """

    engines: Sequence[Engine]
    verified_engines: list[Engine] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    num_unreachable: int = 0
    is_verified: bool = False
    refusal: str | None = None

    def add_verified(self, engine: Engine) -> None:
        self.verified_engines.append(engine)
        self.verified_engines.sort(key=lambda engine: engine.name)  # rows are locked in this order everywhere
        self.is_verified = fleet.has_quorum(self.verified_engines, self.engines)

    @property
    def rejection(self) -> Exception | None:
        """Return the first error that is about the version, not about an engine that cannot be reached."""
        return next((error for error in self.errors if not isinstance(error, EngineUnavailable)), None)


@dataclass(frozen=True)
class Trials:
    """How a version is tried before it is live: in shadow, then as the canary of a share of the users."""

    shadow: ShadowConfig | None = None
    canary: CanaryConfig | None = None


class Delivery(ABC):
    """How trained versions reach the engines."""

    counts_unreached_gates: ClassVar[bool]  # whether an attempt counts whose gates no engine answered
    tasks_after_release: ClassVar[tuple[TaskName, ...]]

    @abstractmethod
    async def deliver(self, attempt: Attempt) -> DeliveryResult:
        """Load the version on the ready engines under its own name, verify it there, and run the gates.

        Raises:
            DamagedAdapter: the files are not the ones that were sealed.
            EngineUnavailable, EngineRefused: during the prompts of a gate, which has decided nothing.
        """

    @abstractmethod
    async def sync(self, db: Database, settings: Settings) -> None:
        """Load what serves on the engines that hold another version in its place."""

    @abstractmethod
    async def has_outdated_engine(self, session: AsyncSession) -> bool:
        """Return whether `sync` has something to do."""

    @abstractmethod
    def trials(self, policy: Policy, settings: Settings) -> Trials:
        """Return how a verified version is tried first."""
