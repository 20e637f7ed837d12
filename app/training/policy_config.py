"""The rewards and the rollout settings of a policy: its own or the deployment's, and the checks on its own."""

from importlib.metadata import entry_points
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import orjson
from pydantic import BaseModel, TypeAdapter, ValidationError

from alignment import extensions
from alignment.config.rewards import EndpointConfig, RewardModelSource, RewardsConfig, RuleSource
from alignment.config.rollouts import RolloutsConfig, apply_limits, exceeded_limit
from alignment.errors import AlignmentError
from alignment.signals import verifiers
from alignment.signals.rules import ENTRY_POINTS, RULES
from alignment.signals.verifiers import Custom, Verifier, VerifierConfig
from app.core.errors import BadRequest, Conflict
from app.core.http import validation_error
from app.core.settings import Settings
from app.models import Policy
from app.policies.service import effective_config
from app.training import feedback_density

M = TypeVar("M", bound=BaseModel)
VERIFIERS: TypeAdapter[VerifierConfig] = TypeAdapter(VerifierConfig)


def effective_rewards(policy: Policy, settings: Settings) -> RewardsConfig:
    """Return the policy's own rewards, or the deployment's, with a reward model where feedback is sparse."""
    if policy.rewards is None and feedback_density.is_sparse(policy, settings):
        return feedback_density.add_reward_model(settings.rewards)
    return effective_config(policy.rewards, settings.rewards, RewardsConfig)


def effective_rollouts(policy: Policy, settings: Settings) -> RolloutsConfig:
    """Return the policy's own settings, limited by the deployment's, or the deployment's.

    All policies share the engines, so a policy cannot use more of them than the deployment allows.
    """
    config = effective_config(policy.rollouts, settings.rollouts, RolloutsConfig)
    return config if policy.rollouts is None else apply_limits(config, settings.rollouts)


def get_reward_model_source(policy: Policy, settings: Settings) -> RewardModelSource:
    """Return the policy's reward source of the type "learned". Raises Conflict without one."""
    source = effective_rewards(policy, settings).reward_model
    if source is None:
        message = f"'{policy.name}' uses no reward model: give its rewards a source of the type 'learned'."
        raise Conflict(message, code="no_learned_source")
    return source


def parse_rewards(body: dict[str, Any], settings: Settings) -> RewardsConfig:
    """Return the rewards in a request body.

    A policy's own rewards may import no code, and may send the deployment's keys only where the deployment sends them.
    Raises BadRequest, which names the first invalid field.
    """
    config = _parse(RewardsConfig, body, tag=2)
    for index, source in enumerate(config.sources):
        if isinstance(source, RuleSource):
            _check_rule(source, f"sources.{index}.function")
        if isinstance(source, EndpointConfig):
            _check_endpoint(source, f"sources.{index}", settings)
    return config


def parse_rollouts(body: dict[str, Any], settings: Settings) -> RolloutsConfig:
    """Return the rollout settings in a request body.

    They may not exceed the deployment's limits. Raises BadRequest, which names the first invalid field.
    """
    config = _parse(RolloutsConfig, body)
    if config.verifiers:
        raise invalid_value("verifiers", "only the deployment's own settings may name a function of a module.")
    if (name := exceeded_limit(config, settings.rollouts)) is not None:
        raise invalid_value(name, "more than the deployment's ATTUNE_ROLLOUTS allows.")
    return config


def invalid_value(param: str, message: str) -> BadRequest:
    return BadRequest(f"{param}: {message}", param=param, code="invalid_value")


def _parse(model: type[M], body: dict[str, Any], tag: int | None = None) -> M:
    """Validate as JSON, so that arrays become tuples while strict mode allows no other conversion."""
    try:
        return model.model_validate_json(orjson.dumps(body), strict=True)
    except ValidationError as error:
        raise validation_error(error, tag) from error


def _check_rule(source: RuleSource, param: str) -> None:
    if ":" in source.function:
        raise invalid_value(param, "only the deployment's own settings may name a function of a module.")
    known = sorted({*RULES, *(point.name for point in entry_points(group=ENTRY_POINTS))})
    if source.function not in known:
        raise invalid_value(param, f"known rules are {', '.join(known)}.")


def _check_endpoint(source: EndpointConfig, param: str, settings: Settings) -> None:
    """Refuse passwords in addresses, and the deployment's keys for any address but the deployment's own."""
    if "@" in urlsplit(source.url).netloc:
        raise invalid_value(f"{param}.url", "an address must not contain a password.")
    allowed = {(own.url, own.key) for own in settings.rewards.sources if isinstance(own, EndpointConfig)}
    if source.key is not None and (source.url, source.key) not in allowed:
        message = "a key is sent only to the address that the deployment's own rewards send it to."
        raise invalid_value(f"{param}.key", message)


def redact_rewards(config: RewardsConfig) -> dict[str, Any]:
    """Return the rewards as JSON: keys appear by name, and addresses without user, password and query."""
    view = config.model_dump(mode="json")
    for source in view["sources"]:
        if "url" in source:
            scheme, host, path, _, _ = urlsplit(source["url"])
            source["url"] = urlunsplit((scheme, host.rpartition("@")[2], path, "", ""))
    return view


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
