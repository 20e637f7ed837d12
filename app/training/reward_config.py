"""The rewards of a policy: its own or the deployment's, and the checks on those that an admin sets."""

from importlib.metadata import entry_points
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import orjson
from pydantic import ValidationError

from alignment.config.rewards import EndpointConfig, RewardsConfig, RuleSource
from alignment.signals.rules import ENTRY_POINTS, RULES
from app.core.errors import BadRequest
from app.core.http import validation_error
from app.core.settings import Settings
from app.models import Policy
from app.policies.overrides import effective_config


def effective_rewards(policy: Policy, settings: Settings) -> RewardsConfig:
    """Return the policy's own rewards, or the deployment's."""
    return effective_config(policy.rewards, settings.rewards, RewardsConfig)


def parse_rewards(body: dict[str, Any], settings: Settings) -> RewardsConfig:
    """Return the rewards in a request body.

    A policy's own rewards may import no code, and may send the deployment's keys only where the deployment sends them.
    Raises BadRequest, which names the first invalid field.
    """
    try:  # as JSON, so that arrays become tuples while strict mode allows no other conversion
        config = RewardsConfig.model_validate_json(orjson.dumps(body), strict=True)
    except ValidationError as error:
        raise validation_error(error, tag=2) from error
    for index, source in enumerate(config.sources):
        if isinstance(source, RuleSource):
            _check_rule(source, f"sources.{index}.function")
        if isinstance(source, EndpointConfig):
            _check_endpoint(source, f"sources.{index}", settings)
    return config


def _check_rule(source: RuleSource, param: str) -> None:
    if ":" in source.function:
        raise BadRequest(
            f"{param}: only the deployment's own settings may name a function of a module.",
            param=param,
            code="invalid_value",
        )
    known = sorted({*RULES, *(point.name for point in entry_points(group=ENTRY_POINTS))})
    if source.function not in known:
        raise BadRequest(f"{param}: known rules are {', '.join(known)}.", param=param, code="invalid_value")


def _check_endpoint(source: EndpointConfig, param: str, settings: Settings) -> None:
    """Refuse passwords in addresses, and the deployment's keys for any address but the deployment's own."""
    if "@" in urlsplit(source.url).netloc:
        raise BadRequest(
            f"{param}.url: an address must not contain a password.", param=f"{param}.url", code="invalid_value"
        )
    allowed = {(own.url, own.key) for own in settings.rewards.sources if isinstance(own, EndpointConfig)}
    if source.key is not None and (source.url, source.key) not in allowed:
        raise BadRequest(
            f"{param}.key: a key is sent only to the address that the deployment's own rewards send it to.",
            param=f"{param}.key",
            code="invalid_value",
        )


def redact_rewards(config: RewardsConfig) -> dict[str, Any]:
    """Return the rewards as JSON: keys appear by name, and addresses without user, password and query."""
    view = config.model_dump(mode="json")
    for source in view["sources"]:
        if "url" in source:
            scheme, host, path, _, _ = urlsplit(source["url"])
            source["url"] = urlunsplit((scheme, host.rpartition("@")[2], path, "", ""))
    return view
