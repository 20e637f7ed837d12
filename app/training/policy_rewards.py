"""What a policy listens to: its own rewards, or the deployment's."""

from functools import lru_cache

import orjson

from alignment.config.rewards import RewardsConfig
from app.core.settings import Settings
from app.models import Policy


def rewards_of(policy: Policy, settings: Settings) -> RewardsConfig:
    return settings.rewards if policy.rewards is None else _parsed(orjson.dumps(policy.rewards))


@lru_cache(maxsize=256)
def _parsed(raw: bytes) -> RewardsConfig:
    return RewardsConfig.model_validate_json(raw)
