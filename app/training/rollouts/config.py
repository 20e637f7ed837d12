"""The rollout settings of a policy: its own or the deployment's, the checks on them, and the verifier of a plan."""

from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError

from alignment import extensions
from alignment.config.rollouts import RolloutsConfig, apply_limits, exceeded_limit
from alignment.errors import AlignmentError
from alignment.signals import verifiers
from alignment.signals.verifiers import (
    Choice,
    Contains,
    Custom,
    Exact,
    JsonSchema,
    Number,
    Regex,
    Verifier,
    VerifierConfig,
)
from app.core.errors import BadRequest
from app.core.http import validation_error
from app.core.settings import Settings
from app.models import Policy
from app.policies.overrides import effective_config

VERIFIERS: TypeAdapter[VerifierConfig] = TypeAdapter(VerifierConfig)


def effective_rollouts(policy: Policy, settings: Settings) -> RolloutsConfig:
    """Return the policy's own settings, limited by the deployment's, or the deployment's.

    All policies share the engines, so a policy cannot use more of them than the deployment allows.
    """
    config = effective_config(policy.rollouts, settings.rollouts, RolloutsConfig)
    return config if policy.rollouts is None else apply_limits(config, settings.rollouts)


def parse_rollouts(body: dict[str, Any], settings: Settings) -> RolloutsConfig:
    """Return the settings in a request body.

    They may not exceed the deployment's limits. Raises BadRequest, which names the first invalid field.
    """
    try:
        config = RolloutsConfig.model_validate_json(orjson.dumps(body), strict=True)
    except ValidationError as error:
        raise validation_error(error) from error
    if config.verifiers:
        raise BadRequest(
            "verifiers: only the deployment's own settings may name a function of a module.",
            param="verifiers",
            code="invalid_value",
        )
    if (name := exceeded_limit(config, settings.rollouts)) is not None:
        raise BadRequest(
            f"{name}: more than the deployment's ATTUNE_ROLLOUTS allows.", param=name, code="invalid_value"
        )
    return config


def load_verifier(body: dict[str, Any], settings: Settings) -> Verifier:
    """Return the verifier of a plan.

    Raises AlignmentError for an unknown or invalid one. The import of a custom function may raise anything.
    """
    try:
        config = VERIFIERS.validate_json(orjson.dumps(body))
    except ValidationError as error:
        raise AlignmentError(f"no verifier: {error.errors()[0]['msg']}") from error
    if not isinstance(config, Custom):
        return config
    name = settings.rollouts.verifiers.get(config.name, config.name)
    return extensions.load_function(name, verifiers.ENTRY_POINTS, settings.rollouts.verifiers, noun="verifier")


def needs_reference(verifier: VerifierConfig) -> bool:
    """Whether the verifier compares replies with the `reference` of the prompt."""
    if isinstance(verifier, Regex):
        return verifier.pattern is None
    if isinstance(verifier, JsonSchema):
        return verifier.schema_ is None
    return isinstance(verifier, Exact | Contains | Number | Choice)
