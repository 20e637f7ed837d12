"""The rewards and the rollout settings of a policy: its own or the deployment's, and the checks on its own."""

from collections.abc import Mapping
from typing import TypeVar
from urllib.parse import urlsplit, urlunsplit

import orjson
from pydantic import BaseModel, TypeAdapter, ValidationError

from alignment import extensions
from alignment.config.algorithm import UpdateConfig
from alignment.config.rewards import RewardModelSource, RewardsConfig
from alignment.config.rollouts import RolloutsConfig
from alignment.errors import AlignmentError
from alignment.signals import verifiers
from alignment.signals.verifiers import Custom, Verifier, VerifierConfig
from app.core.errors import Conflict
from app.core.http import validation_error
from app.core.settings import Settings
from app.models import Policy
from app.policies.override_checks import check_rewards, check_rollouts, invalid_value
from app.policies.overrides import effective_settings
from app.training import feedback_density

M = TypeVar("M", bound=BaseModel)
VERIFIERS: TypeAdapter[VerifierConfig] = TypeAdapter(VerifierConfig)


def effective_rewards(policy: Policy, settings: Settings) -> RewardsConfig:
    """Return the policy's own rewards, or the deployment's, with a reward model where feedback is sparse."""
    rewards = effective_settings(policy, settings).rewards
    if not has_own_sources(policy) and feedback_density.is_sparse(policy, settings):
        return feedback_density.add_reward_model(rewards)
    return rewards


def has_own_sources(policy: Policy) -> bool:
    """Whether the policy has reward sources of its own, rather than the deployment's."""
    return "sources" in (policy.rewards or {})


def effective_rollouts(policy: Policy, settings: Settings) -> RolloutsConfig:
    """Return the policy's own settings, limited by the deployment's, or the deployment's."""
    return effective_settings(policy, settings).rollouts


def get_reward_model_source(policy: Policy, settings: Settings) -> RewardModelSource:
    """Return the policy's reward source of the type "learned". Raises Conflict without one."""
    source = effective_rewards(policy, settings).reward_model
    if source is None:
        message = f"'{policy.name}' uses no reward model: give its rewards a source of the type 'learned'."
        raise Conflict(message, code="no_learned_source")
    return source


def parse_rewards(body: dict[str, object], settings: Settings, algorithm: UpdateConfig) -> RewardsConfig:
    """Return the rewards in a request body, for a policy with this algorithm.

    A policy's own rewards may import no code, and may send the deployment's keys only where the deployment sends them.
    Raises BadRequest, which names the first invalid field.
    """
    config = _parse(RewardsConfig, body)
    try:
        config.check_credit(algorithm)
    except ValueError as error:
        raise invalid_value("discount" if config.discount > 0 else "episode_credit", f"{error}") from error
    check_rewards(config, settings)
    return config


def parse_rollouts(body: dict[str, object], settings: Settings) -> RolloutsConfig:
    """Return the rollout settings in a request body.

    They may not exceed the deployment's limits. Raises BadRequest, which names the first invalid field.
    """
    config = _parse(RolloutsConfig, body)
    if config.verifiers:
        raise invalid_value("verifiers", "only the deployment's own settings may name a function of a module.")
    check_rollouts(config, settings)
    return config


def _parse(model: type[M], body: dict[str, object]) -> M:
    """Validate as JSON, so that arrays become tuples while strict mode allows no other conversion."""
    try:
        return model.model_validate_json(orjson.dumps(body), strict=True)
    except ValidationError as error:
        raise validation_error(error, model) from error


def redact_rewards(config: RewardsConfig) -> dict[str, object]:
    """Return the rewards as JSON: keys appear by name, and addresses without user, password and query."""
    view = config.model_dump(mode="json")
    for source in view["sources"]:
        if "url" in source:
            scheme, host, path, _, _ = urlsplit(source["url"])
            source["url"] = urlunsplit((scheme, host.rpartition("@")[2], path, "", ""))
    return view


def load_verifier(body: Mapping[str, object], settings: Settings) -> Verifier:
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
