"""A policy's own settings: they have the names of the deployment's, and replace them value by value.

A setting that belongs to the base model, the engines or the trainer's processes cannot differ, because all policies
share these; SHARED says which, and why. `app.policies.override_checks` checks what an admin sends.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple

import orjson
from pydantic import BaseModel, BeforeValidator, TypeAdapter
from sqlalchemy import null

from alignment.config.algorithm_choice import AlgorithmConfig
from alignment.config.rewards import RewardsConfig
from alignment.config.rollouts import RolloutsConfig, apply_limits
from alignment.json_values import as_object
from alignment.release.shadow import ShadowConfig
from app.core.settings import Settings
from app.core.settings.release import ReleaseSettings
from app.core.settings.root import parse_algorithm
from app.core.settings.trainer import TrainerSettings
from app.models import Policy

Own = dict[str, Any]  # a policy's own values as nested tables: {"trainer": {"optim": {"lr": 1e-4}}}
SECTIONS: dict[str, TypeAdapter[Any]] = {
    "algorithm": TypeAdapter(Annotated[AlgorithmConfig, BeforeValidator(parse_algorithm)]),
    "trainer": TypeAdapter(TrainerSettings),
    "rewards": TypeAdapter(RewardsConfig),
    "rollouts": TypeAdapter(RolloutsConfig),
    "release": TypeAdapter(ReleaseSettings),
}
_ADAPTER = "the engines are launched for one shape of adapter"
_PROCESS = "all policies share the trainer's processes and its memory"
_ENGINES = "all policies share the engines"
SHARED = {
    "trainer.adaptation": _ADAPTER,
    "trainer.lora": _ADAPTER,
    "trainer.critic.r": _PROCESS,
    "trainer.ranks": _PROCESS,
    "trainer.device": _PROCESS,
    "trainer.seed": _PROCESS,
    "trainer.micro_batch_tokens": _PROCESS,
    "trainer.packing": _PROCESS,
    "trainer.logits_chunk": _PROCESS,
    "trainer.activation_checkpointing": _PROCESS,
    "rollouts.verifiers": "it names the deployment's own code",
    "release.keep_versions": _ENGINES,
    "release.probe_tolerance": _ENGINES,
}
STAGES = ("canary", "shadow")  # of a release; each has a column of its own


class _Cached(NamedTuple):
    deployment: tuple[Any, ...]  # the values of the deployment's settings that the result was computed from
    effective: Settings


MAX_CACHED = 1024
_effective: dict[bytes, _Cached] = {}


def own_values(policy: Policy) -> Own:
    """Return the policy's own values by section; sections without any are left out."""
    own: Own = {name: dict(as_object(values)) for name, values in (policy.settings or {}).items()}
    own |= {name: value for name in ("rewards", "rollouts") if (value := getattr(policy, name)) is not None}
    stages = {name: value for name in STAGES if (value := getattr(policy, name)) is not None}
    if stages:
        own["release"] = own.get("release", {}) | stages
    return {name: own[name] for name in SECTIONS if own.get(name)}


def set_own_values(policy: Policy, own: Own) -> None:
    """Store values in the policy's columns. None would be stored as JSON null, so that an empty column gets null()."""
    release = dict(own.get("release", {}))
    for name in STAGES:
        if release.get(name) is False:  # off, although the deployment has the stage
            setattr(policy, name, null())
        else:
            value = release.pop(name, None)
            setattr(policy, name, null() if value is None else value)
    policy.rewards, policy.rollouts = own.get("rewards") or null(), own.get("rollouts") or null()
    sections = {"algorithm": own.get("algorithm"), "trainer": own.get("trainer"), "release": release}
    policy.settings = {name: values for name, values in sections.items() if values} or null()


def effective_settings(policy: Policy, settings: Settings) -> Settings:
    """Return the deployment's settings with the policy's own values in their places.

    The results are kept, since reward settings are asked for with every reply. Raises ValidationError if the
    deployment's settings have changed so that the policy's own no longer fit; `attune up` refuses to start then.
    """
    own = own_values(policy)
    if not own:
        return settings
    key, deployment = orjson.dumps(own), tuple(settings.__dict__.values())
    cached = _effective.get(key)
    if cached is None or any(a is not b for a, b in zip(cached.deployment, deployment, strict=True)):
        if len(_effective) >= MAX_CACHED:
            _effective.clear()
        sections = {name: SECTIONS[name].validate_python(overlay(settings, name, own[name])) for name in own}
        cached = _effective[key] = _Cached(deployment, settings.model_copy(update=_limit(sections, settings)))
    return cached.effective


def _limit(sections: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Return the sections within the deployment's limits: all policies share the engines.

    The tokens of a shadow deployment are limited by the default where the deployment has none.
    """
    if (rollouts := sections.get("rollouts")) is not None:
        limited = apply_limits(rollouts, settings.rollouts)
        sections["rollouts"] = limited.model_copy(update={"verifiers": settings.rollouts.verifiers})
    if (release := sections.get("release")) is not None and release.shadow is not None:
        limit = (settings.release.shadow or ShadowConfig()).tokens_per_hour
        shadow = release.shadow.model_copy(update={"tokens_per_hour": min(release.shadow.tokens_per_hour, limit)})
        sections["release"] = release.model_copy(update={"shadow": shadow})
    return sections


def overlay(settings: Settings, section: str, own: Mapping[str, object]) -> dict[str, Any]:
    """Return the values of a section that were given, the policy's own in place of the deployment's.

    An algorithm of another type than the deployment's stands alone.
    """
    base = getattr(settings, section)
    if section == "algorithm" and own["type"] != base.type:
        return dict(own)
    return ({"type": base.type} if section == "algorithm" else {}) | _overlay(base, own)


def _overlay(base: BaseModel, own: Mapping[str, object]) -> dict[str, Any]:
    values = {name: getattr(base, name) for name in base.model_fields_set}
    for name, value in own.items():
        inner = getattr(base, name, None)
        is_table = isinstance(inner, BaseModel) and isinstance(value, Mapping)
        values[name] = _overlay(inner, value) if is_table else value  # type: ignore[arg-type]
    return values


def leaf_paths(own: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    """Yield the paths of a policy's own values, e.g. "trainer.optim.lr". A list is one value."""
    for name, value in own.items():
        if isinstance(value, Mapping) and value:
            yield from leaf_paths(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def find_shared(path: str) -> str | None:
    """Return why a setting of a policy's sections, or a table around it, cannot differ; None if it can."""
    return next((why for shared, why in SHARED.items() if path == shared or path.startswith(f"{shared}.")), None)
