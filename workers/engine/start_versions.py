"""What an engine must load when it starts, before it takes traffic: adapters, or full weights."""

from abc import ABC, abstractmethod
from collections.abc import Collection
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncSession

from app.core.settings import Settings
from app.engines import inventory, load_errors
from app.models import Engine, VersionState
from workers.base_model import check_adapter_files, check_weights_files
from workers.engine.version_files import VersionRef, WeightsRef


class StartVersions(ABC):
    """Which versions an engine loads as it starts, and which of them it may lack."""

    @abstractmethod
    def check(self, settings: Settings, directory: Path, manifest_sha256: str) -> None:
        """Raise DamagedAdapter unless a version's files are those that were sealed and fit the base model."""

    @abstractmethod
    async def read_wanted(self, session: AsyncSession, settings: Settings) -> list[VersionRef]:
        """Return the versions to load."""

    @abstractmethod
    async def read_required(self, session: AsyncSession) -> set[str]:
        """Return the names of the versions that serve, without which the engine takes no traffic."""

    @abstractmethod
    def may_lack(self, errors: Collection[str]) -> set[str]:
        """Return which of the versions that could not be loaded the engine may lack even if they serve."""

    @abstractmethod
    def record(self, engine: Engine, loaded: list[str]) -> None:
        """Record in the engine's row what it has loaded."""


class StartAdapters(StartVersions):
    """All wanted adapters. A damaged one must not keep the engine down, since it serves the others."""

    def check(self, settings: Settings, directory: Path, manifest_sha256: str) -> None:
        check_adapter_files(settings, directory, manifest_sha256)

    async def read_wanted(self, session: AsyncSession, settings: Settings) -> list[VersionRef]:
        wanted = await inventory.wanted_versions(session, settings.release.keep_versions)
        engine = await session.get_one(Engine, settings.engine.name)
        versions = [version for version in wanted if version.state != VersionState.TRAINED]  # evaluate loads those
        return [
            VersionRef(
                version.adapter_name,
                Path(version.adapter_path),
                version.manifest_sha256,
                crashes=load_errors.count_crashes(engine, version.adapter_name, version.manifest_sha256),
            )
            for version in versions
            if version.adapter_name and version.adapter_path and version.manifest_sha256
        ]

    async def read_required(self, session: AsyncSession) -> set[str]:
        return await inventory.serving_adapter_names(session)

    def may_lack(self, errors: Collection[str]) -> set[str]:
        return set(errors)

    def record(self, engine: Engine, loaded: list[str]) -> None:
        engine.loaded = sorted(loaded)


class StartWeights(StartVersions):
    """The weights of the version that serves. Without them the engine stays down: it has nothing else to serve."""

    def check(self, settings: Settings, directory: Path, manifest_sha256: str) -> None:
        check_weights_files(settings, directory, manifest_sha256)

    async def read_wanted(self, session: AsyncSession, settings: Settings) -> list[VersionRef]:
        """Return none for the base model, whose weights an engine starts with."""
        version = await inventory.serving_version(session)
        if not (version.weights and version.adapter_path and version.manifest_sha256):
            return []
        return [WeightsRef(version.weights, Path(version.adapter_path), version.manifest_sha256)]

    async def read_required(self, session: AsyncSession) -> set[str]:
        weights = (await inventory.serving_version(session)).weights
        return set() if weights is None else {weights}

    def may_lack(self, errors: Collection[str]) -> set[str]:
        return set()

    def record(self, engine: Engine, loaded: list[str]) -> None:
        """If none were loaded, the engine has the base model's weights."""
        engine.weights = loaded[-1] if loaded else None


START_VERSIONS: dict[str, StartVersions] = {"lora": StartAdapters(), "full": StartWeights()}  # by trainer.adaptation


def start_versions_of(settings: Settings) -> StartVersions:
    return START_VERSIONS[settings.trainer.adaptation]
