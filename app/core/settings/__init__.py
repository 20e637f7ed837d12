"""The settings: one file, `attune.toml`, whose values the environment overrides. `loading` alone reads the two."""

from app.core.settings.engine import REPOSITORY, EngineSettings
from app.core.settings.limits import (
    LimitSettings,
    ObservabilitySettings,
    PrivacySettings,
    RaterSettings,
    TrackerName,
)
from app.core.settings.loading import get_settings
from app.core.settings.release import ReleaseSettings
from app.core.settings.root import DEMO_MODEL, Settings
from app.core.settings.service import BrokerSettings, DatabaseSettings, ServerSettings, WorkerSettings
from app.core.settings.trainer import TrainerSettings

__all__ = [
    "DEMO_MODEL",
    "REPOSITORY",
    "BrokerSettings",
    "DatabaseSettings",
    "EngineSettings",
    "LimitSettings",
    "ObservabilitySettings",
    "PrivacySettings",
    "RaterSettings",
    "ReleaseSettings",
    "ServerSettings",
    "Settings",
    "TrackerName",
    "TrainerSettings",
    "WorkerSettings",
    "get_settings",
]
