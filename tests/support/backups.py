"""A deployment with versions whose files exist, and databases to restore into."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import psycopg

from app.core.settings import DEMO_MODEL, Settings
from app.models import RewardModelState, Version, VersionState
from tests.conftest import POSTGRES
from tests.support.adapters import make_adapter
from tests.support.deployment import Harness
from tests.support.human_feedback import create_reward_model
from tests.support.updates import release


def ignore_progress(what: str, done: int, total: int | None) -> None:
    pass


async def create_sealed_version(harness: Harness, number: int, *, live: bool = False) -> Version:
    """Create a version with a sealed adapter in the home, as the trainer does."""
    path = harness.settings.versions_dir / f"shop-v{number}.0a1b2c3d.1"
    sha256 = make_adapter(path, DEMO_MODEL, seed=number)
    version = await harness.version(VersionState.VERIFIED, adapter_path=str(path), manifest_sha256=sha256)
    return await release(harness, version) if live else version


async def create_sealed_reward_model(harness: Harness) -> Path:
    """Create a serving reward model with files, and return its folder."""
    path = harness.settings.reward_models_dir / "shop-abcdef" / "rm-1.1"
    sha256 = make_adapter(path, DEMO_MODEL, seed=99)
    await create_reward_model(harness, RewardModelState.SERVING, path=str(path), manifest_sha256=sha256)
    return path


@contextmanager
def empty_home(settings: Settings, home: Path) -> Iterator[Settings]:
    """Yield settings with an empty home and an empty database of the same kind; the database is dropped at the end."""
    if settings.database_url.startswith("sqlite"):
        yield settings.replace({"home": home, "database.url": f"sqlite+aiosqlite:///{home}/attune.db"})
        return
    name = f"attune_{uuid4().hex[:12]}"
    with psycopg.connect(POSTGRES, autocommit=True) as server:
        server.execute(f"CREATE DATABASE {name}")
        try:
            url = POSTGRES.rpartition("/")[0].replace("postgresql://", "postgresql+psycopg://") + f"/{name}"
            yield settings.replace({"home": home, "database.url": url})
        finally:
            server.execute(f"DROP DATABASE {name} WITH (FORCE)")
