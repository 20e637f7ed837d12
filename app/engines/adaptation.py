"""What the kind of versions means for engines and for the requests to them: adapters, or full weights.

An engine holds many adapters beside one another on the base model's weights, but the full weights of one version only.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import database_time
from app.core.errors import Conflict
from app.core.settings import Settings
from app.engines.fleet import LoadableVersion, is_verifying
from app.inference.engine import BASE_WEIGHTS
from app.inference.request import EngineTarget
from app.models import Deployment, Engine, Policy, PolicyState, Version


class Adaptation(ABC):
    """How the versions of a deployment share its engines."""

    keeps_base_model: ClassVar[bool]  # whether an engine has the base model's weights at all times

    @abstractmethod
    async def check_versions(self, session: AsyncSession) -> None:
        """Raise ValueError if the database holds versions of the other kind, or more policies than engines can serve.

        An adapter belongs to the base model's weights, and an engine holds the full weights of one policy only.
        """

    @abstractmethod
    def target(self, version: LoadableVersion, base_model: str, label: str) -> EngineTarget:
        """Return what a call of this version names. `label` is the version's name, such as "assistant@v12"."""

    @abstractmethod
    def wait_seconds(self, settings: Settings) -> float:
        """Return how long a chat waits for an engine that has loaded its version."""

    @abstractmethod
    async def is_about_to_serve(self, session: AsyncSession, engines: Sequence[Engine], seconds: float) -> bool:
        """Whether one of the engines, none of which serves yet, is expected to within `seconds`."""

    @abstractmethod
    def require_several_versions(self, feature: str) -> None:
        """Raise Conflict if an engine cannot hold the several versions that `feature` needs."""


class Adapters(Adaptation):
    keeps_base_model = True

    async def check_versions(self, session: AsyncSession) -> None:
        other = await session.scalar(
            select(Version.weights).where(Version.weights.is_not(None)).order_by(Version.number).limit(1)
        )
        if other is not None:
            raise _other_kind(f"{other} is full weights, not an adapter")

    def target(self, version: LoadableVersion, base_model: str, label: str) -> EngineTarget:
        return EngineTarget(adapter=version.adapter, prefix_key=base_model, label=label)

    def wait_seconds(self, settings: Settings) -> float:
        return 0.0

    async def is_about_to_serve(self, session: AsyncSession, engines: Sequence[Engine], seconds: float) -> bool:
        return False

    def require_several_versions(self, feature: str) -> None:
        pass


class FullWeights(Adaptation):
    """The engines follow the deployment: a release swaps the weights of one engine after the other."""

    keeps_base_model = False

    async def check_versions(self, session: AsyncSession) -> None:
        other = await session.scalar(
            select(Version.adapter).where(Version.adapter.is_not(None)).order_by(Version.number).limit(1)
        )
        if other is not None:
            raise _other_kind(f"{other} is an adapter, not full weights")
        if await session.scalar(select(func.count()).where(Policy.state != PolicyState.DELETED)) != 1:
            raise ValueError(
                "an engine holds the full weights of one policy, and this database has several policies: "
                "name another ATTUNE_HOME"
            )

    def target(self, version: LoadableVersion, base_model: str, label: str) -> EngineTarget:
        weights = version.weights or BASE_WEIGHTS
        return EngineTarget(weights=weights, prefix_key=version.weights or base_model, label=label)

    def wait_seconds(self, settings: Settings) -> float:
        return settings.engine.weight_swap_wait_seconds

    async def is_about_to_serve(self, session: AsyncSession, engines: Sequence[Engine], seconds: float) -> bool:
        """Whether the deployment has changed a moment ago, or an engine swaps its weights or verifies them."""
        time = await database_time(session)
        changed_at = await session.scalar(select(func.max(Deployment.changed_at)))
        if changed_at is not None and time - changed_at < seconds:
            return True
        swapping = any(engine.swapping_until is not None and engine.swapping_until > time for engine in engines)
        return swapping or any([await is_verifying(session, engine) for engine in engines])

    def require_several_versions(self, feature: str) -> None:
        message = f"{feature} needs several versions on one engine, and an engine holds one version of full weights."
        raise Conflict(message, code="full_weights")


def _other_kind(problem: str) -> ValueError:
    return ValueError(f"{problem}: name another ATTUNE_HOME, or another ATTUNE_TRAINER__ADAPTATION")


ADAPTATIONS: dict[str, Adaptation] = {"lora": Adapters(), "full": FullWeights()}  # by trainer.adaptation


def adaptation_of(settings: Settings) -> Adaptation:
    """Return what the deployment trains. It is fixed for its database: see `Adaptation.check_versions`."""
    return ADAPTATIONS[settings.trainer.adaptation]
