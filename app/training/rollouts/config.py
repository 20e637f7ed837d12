"""What a policy may ask for itself: its own rollouts, or the deployment's. And which verifier a plan means."""

from functools import lru_cache
from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError

from alignment import extensions
from alignment.config.rollouts import RolloutsConfig, within
from alignment.errors import AlignmentError
from alignment.signals import verifiers
from alignment.signals.verifiers import Custom, Verifier, VerifierConfig
from app.core.settings import Settings
from app.models import Policy

VERIFIERS: TypeAdapter[VerifierConfig] = TypeAdapter(VerifierConfig)


def rollouts_of(policy: Policy, settings: Settings) -> RolloutsConfig:
    """An engine is everybody's: what a policy has set for itself goes no further than the deployment does."""
    if policy.rollouts is None:
        return settings.rollouts
    return within(_parsed(orjson.dumps(policy.rollouts)), settings.rollouts)


@lru_cache(maxsize=256)
def _parsed(raw: bytes) -> RolloutsConfig:
    return RolloutsConfig.model_validate_json(raw)


def verifier(told: dict[str, Any], settings: Settings) -> Verifier:
    """Raises AlignmentError for one that there is not. Importing a function of one's own may raise anything."""
    try:
        config = VERIFIERS.validate_json(orjson.dumps(told))
    except ValidationError as error:
        raise AlignmentError(f"no verifier: {error.errors()[0]['msg']}") from error
    if not isinstance(config, Custom):
        return config
    name = settings.rollouts.verifiers.get(config.name, config.name)
    return extensions.load(name, verifiers.ENTRY_POINTS, settings.rollouts.verifiers, noun="verifier")
