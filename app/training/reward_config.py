"""A policy's own rewards, as its admins set them: valid, importing nothing, and no way to carry the deployment's keys
off."""

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


def read(body: dict[str, Any], settings: Settings) -> RewardsConfig:
    """Raises BadRequest, which names the first field that is wrong."""
    try:  # as JSON, so that lists are tuples and nothing else is taken for what it is not
        config = RewardsConfig.model_validate_json(orjson.dumps(body), strict=True)
    except ValidationError as error:
        raise validation_error(error, tag=2) from error
    for place, source in enumerate(config.sources):
        if isinstance(source, RuleSource):
            _check_rule(source, f"sources.{place}.function")
        if isinstance(source, EndpointConfig):
            _check_endpoint(source, f"sources.{place}", settings)
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
    """The deployment's keys go where the deployment sends them, and not to a tenant's own server."""
    if "@" in urlsplit(source.url).netloc:
        raise BadRequest(f"{param}.url: an address holds no password.", param=f"{param}.url", code="invalid_value")
    theirs = {(one.url, one.key) for one in settings.rewards.sources if isinstance(one, EndpointConfig)}
    if source.key is not None and (source.url, source.key) not in theirs:
        raise BadRequest(
            f"{param}.key: a key is sent only to the address that the deployment's own rewards send it to.",
            param=f"{param}.key",
            code="invalid_value",
        )


def shown(config: RewardsConfig) -> dict[str, Any]:
    """Names of keys, never keys; nor what an address may hold of one."""
    view = config.model_dump(mode="json")
    for source in view["sources"]:
        if "url" in source:
            scheme, host, path, _, _ = urlsplit(source["url"])
            source["url"] = urlunsplit((scheme, host.rpartition("@")[2], path, "", ""))
    return view
